"""Message algorithms of the collectives, one module for each family.

Floor 2: imports `reduction`, `segments` and `half_precision` of collectives, and comm; `hierarchical`
also uses `node`. Each allreduce is a function of a communicator, a buffer and an op; the docstring of its module has
its cost and its paper. Begin with `ring` (large buffers) and `hypercube` (recursive doubling and Rabenseifner).
"""
