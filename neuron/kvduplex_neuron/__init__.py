"""Neuron Direct RDMA backend."""
