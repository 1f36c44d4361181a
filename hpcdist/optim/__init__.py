"""Optimizers as pure functions on ranges of the flat parameter space, without ranks or messages.

Floor 3: imports collectives (conversions of 16-bit floats), arrays and errors. Start with `base.SegmentWise` and
`optimizer.build`.
"""
