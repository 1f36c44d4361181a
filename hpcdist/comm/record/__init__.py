"""Records of the operations of a rank: flight recorder, spans, timing, and clock offsets between hosts.

Begin with `flight_recorder.Recorder` and `flight_recorder.read`.
"""
