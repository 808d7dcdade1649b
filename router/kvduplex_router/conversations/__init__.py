"""Who continues what: keys, history digests, stored references and their leases."""
