"""Generators of schedules: orders of passes by name or from a file, and their operation lists.

Floor 4; without arrays or MPI. Begin with `registry.SCHEDULES` and `operation_list.compute_operations`.
"""
