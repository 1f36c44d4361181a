"""Collectives on GPU buffers: NCCL, kernels on peer memory, device pointers in MPI, or staging through the host.

Floor 2: imports comm, arrays and the reduction operators of collectives. Imports cupy at the first use only.
Begin with `staging.route`, which selects the path of a buffer, and `nccl.nccl_allreduce`.
"""
