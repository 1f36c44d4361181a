"""Gradient compression as pure maths on arrays: values to bytes and back, without ranks or messages.

Floor 3: imports collectives (conversions of 16-bit floats), arrays and errors. `quantise` has codes of few bits,
`sparsify` the largest or random elements, `casts` 16-bit floats, `powersgd` low rank; error feedback adds what was
lost to the next gradient. The strategies in `strategies.compressed` send the payloads. Begin with
`compressor.Compressor` (the protocol) and `compressor.ErrorFeedback`.
"""
