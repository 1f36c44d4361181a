"""Collectives on buffers of GPUs: NCCL, kernels on peer memory, device pointers in MPI, staging on the host.

Floor 2: imports comm, arrays and the reduction operators of collectives. cupy is imported at the first use only.
Begin with `staging.route`, which selects the path of a buffer, and `nccl.nccl_allreduce`.
"""
