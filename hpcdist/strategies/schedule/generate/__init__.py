"""Generators of schedules: orders of passes by name or from a file, and their operation lists.

Floor 4; pure functions without arrays or MPI, to check recipes before anything is loaded. Begin with
`registry.SCHEDULES`, the table of schedules, and `operation_list.compute_operations`.
"""
