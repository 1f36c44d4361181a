"""Array layer: one interface for numpy and cupy, and the flat address space of a model.

Floor 0: imports only errors. Ranges, layouts and pieces locate a tensor in the flat space; stores hold its bytes. Begin
with `ranges.Range` and `layout.Layout`.
"""
