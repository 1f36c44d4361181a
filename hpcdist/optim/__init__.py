"""Optimizers as pure maths on ranges of the flat space of parameters, without ranks or messages.

Floor 3: imports collectives (conversions of 16-bit floats), arrays and errors. At the top are the optimizers (`adam`,
`sgd`), their base classes, learning rates, batch sizes and gradient norms; `update` has the loops over elements.
`config` imports nothing but the errors. Begin with `base.SegmentWise` and `optimizer.build`.
"""
