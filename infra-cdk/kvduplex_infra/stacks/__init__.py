"""The stacks of a cluster, in the order they depend on each other."""
