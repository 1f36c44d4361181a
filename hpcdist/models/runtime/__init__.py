"""Runtime of a model's passes: activation memory, recomputation, and a split backward.

Floor 3, inside models: imports arrays, `hpcdist.models.model` and `hpcdist.models.stage`. `arena` holds activations;
`split_backward` has recomputation and the two-pass backward. Start with `arena.Arena` and
`split_backward.with_recomputation`.
"""
