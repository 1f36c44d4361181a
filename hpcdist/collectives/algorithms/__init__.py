"""Message algorithms of the collectives, one module per family.

Floor 2: imports `reduction`, `segments` and `half_precision` of collectives, and comm; `hierarchical` also uses `node`.
The module docstrings give costs and papers. Begin with `ring` (large buffers) and `hypercube` (recursive doubling and
Rabenseifner).
"""
