"""Runtime of a model's passes: memory of activations, recomputation, and a backward in two passes.

Floor 3, inside models: imports arrays, `hpcdist.models.model` and `hpcdist.models.stage`. `arena` holds what forward
keeps for backward, `split_backward` has recomputation and the operations of a backward in two passes.
Begin with `arena.Arena` and `split_backward.with_recomputation`.
"""
