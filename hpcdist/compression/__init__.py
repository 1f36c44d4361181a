"""Gradient compression as pure maths on arrays: values to bytes and back, without ranks or messages.

Floor 3: imports collectives (16-bit float conversions), arrays and errors. The strategies in `strategies.compressed`
send the payloads. Begin with `compressor.Compressor`.
"""
