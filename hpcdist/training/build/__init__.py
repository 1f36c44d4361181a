"""Assembly of a run from its recipe: rank context, exchange, executor, operation list, and initial state.

May import the packages below training and, of training, `recipe`, `data`, `chaos` and the step observers in `observe`.
Begin with `assemble.assemble` and `trainer.Trainer`.
"""
