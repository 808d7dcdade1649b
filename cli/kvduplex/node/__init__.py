"""What runs on a provisioned machine: ``/etc/kvduplex/node.yaml`` in, one engine or the router out."""
