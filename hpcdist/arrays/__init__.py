"""Array layer: one interface for numpy and cupy, and the flat address space of a model.

Floor 0 of the import order: imports only errors. Ranges, layouts and pieces locate a tensor in the flat space; stores
hold its bytes in memory or in a file; `backend` handles arrays of both libraries; `jit` compiles scalar loops; `gpu`
contains all code that uses cupy. Begin with `ranges.Range` and `layout.Layout`.
"""
