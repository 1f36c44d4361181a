"""Records of the operations of a rank: flight recorder, spans, timing, and clock offsets between hosts.

Part of comm (floor 1). The recorder and the spans write memory-mapped files that survive SIGKILL; telemetry reads
them and aligns those of several hosts by the measured clock offsets. Begin with `flight_recorder.Recorder` and
`flight_recorder.read`.
"""
