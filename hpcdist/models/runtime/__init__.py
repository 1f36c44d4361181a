"""Runtime of a model's passes: activation memory, recomputation, and a split backward.

Floor 3, inside models: imports arrays, `hpcdist.models.model` and `hpcdist.models.stage`. Start with `arena.Arena` and
`split_backward.with_recomputation`.
"""
