"""Collectives between the ranks of a node through shared memory, without messages or MPI barriers.

Floor 2: imports comm, arrays, and the modules of collectives that send nothing. Begin with
`shared_memory.node_shared_allreduce` (algorithm `node_shared`) and `protocol`, which orders the memory accesses. `flow`
serves the hierarchical allreduce; `kernels` contains the compiled reductions.
"""
