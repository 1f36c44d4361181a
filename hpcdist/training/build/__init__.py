"""Assembly of a run from its recipe: rank context, exchange, executor, operations, and the state to begin from.

`assemble` makes all parts once; nothing is set on them later. It may import the packages below training and, of
training, `recipe`, `data`, `chaos` and two observers of steps (`observe.noise_scale` and `observe.sdc_check`). Begin
with `assemble.assemble` and `trainer.Trainer`.
"""
