"""Collectives between the ranks of a node through shared memory, without messages or MPI barriers.

Begin with `shared_memory.node_shared_allreduce` (algorithm `node_shared`) and `protocol`, which orders the memory
accesses.
"""
