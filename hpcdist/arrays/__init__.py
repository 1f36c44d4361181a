"""Arrays: numpy and cupy behind one interface, and the flat address space of a model.

Floor 0: imports errors, and no other package of hpcdist. Flat ranges, layouts and pieces say where a tensor lies;
stores hold its bytes, in memory or in a file; `backend` works on the array of either library; `jit` compiles scalar
loops, and `gpu` has all that uses cupy.
Begin with `ranges.Range` and `layout.Layout`.
"""
