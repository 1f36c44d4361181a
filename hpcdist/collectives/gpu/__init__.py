"""Collectives on GPU buffers: NCCL, kernels on peer memory, device pointers in MPI, or staging through the host.

Begin with `staging.route`, which selects the path of a buffer, and `nccl.nccl_allreduce`.
"""
