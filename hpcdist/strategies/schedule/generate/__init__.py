"""Generators of schedules: orders of passes by name or from a file, and the operation lists they become.

Floor 4; pure functions, without arrays or MPI, so that a recipe can be checked before anything is loaded. `passes`
has GPipe, 1F1B, interleaved and zero-bubble orders; `operation_list` also reads those that a user writes. Begin with
`registry.SCHEDULES`, the table of all, and `operation_list.compute_operations`.
"""
