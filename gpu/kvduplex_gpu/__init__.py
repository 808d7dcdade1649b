"""GPUDirect RDMA backend."""
