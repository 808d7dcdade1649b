"""``kvduplex launch``: a cluster from the prebuilt image, in an existing subnet, without CDK."""
