"""Runtime of a model's passes: memory of activations, recomputation, and a backward in two passes.

Floor 3, inside models: imports arrays, `hpcdist.models.model`, `hpcdist.models.model` and `hpcdist.models.stage`.
Strategies and the trainer choose from it what a step needs.
Begin with `arena.Arena` and `recompute.with_recomputation`.
"""
