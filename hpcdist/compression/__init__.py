"""Gradient compression as pure maths on arrays: values to bytes and back, without ranks or messages.

Floor 3: imports collectives (16-bit float conversions), arrays and errors. `quantise` has codes of few bits,
`sparsify` the largest or random elements, `casts` 16-bit floats, `powersgd` low rank. Error feedback adds lost values
to the next gradient. The strategies in `strategies.compressed` send the payloads. Begin with `compressor.Compressor`.
"""
