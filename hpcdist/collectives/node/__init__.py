"""Collectives inside a node, through memory that its ranks share: no message and no barrier of the MPI library.

Floor 2: imports comm, arrays, and the modules of collectives that send nothing. Begin with
`shared_memory.node_shared_allreduce` (the algorithm `node_shared`) and `protocol`, which defines in what order ranks
may touch the shared memory. `flow` serves the hierarchical allreduce, `kernels` has the compiled reductions.
"""
