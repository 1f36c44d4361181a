"""Optimizers as pure functions on ranges of the flat parameter space, without ranks or messages.

Floor 3: imports collectives (conversions of 16-bit floats), arrays and errors. The top level has the optimizers
(`adam`, `sgd`), their base classes, learning rates, batch sizes and gradient norms; `update` has the loops over
elements. `config` imports only the errors. Start with `base.SegmentWise` and `optimizer.build`.
"""
