"""Assembly of a run from its recipe: rank context, exchange, executor, operations, and the state to begin from.

`assemble` in `trainer` is the only entry; it asks `selection` for the collective algorithm and the compression,
`pipeline` for the stages, and `state` for initial or restored values. It may import the packages below training, and
of training `recipe`, `data` and `chaos`. Begin with `trainer.assemble` and `trainer.Trainer`.
"""
