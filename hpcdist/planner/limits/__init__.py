"""Limits of layouts: those that cannot exist, and those that this version cannot run.

Imports `model`, `cluster` and `layout` of the planner. Begin with `checks.shape_problems` (impossible layouts) and
`unsupported.unsupported` (possible, but not built).
"""
