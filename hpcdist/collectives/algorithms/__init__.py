"""Message algorithms of the collectives, one module per family.

Begin with `ring` (large buffers) and `hypercube` (recursive doubling and Rabenseifner).
"""
