"""Records of the operations of a rank: flight recorder, spans, timing, and clock offsets between hosts.

Part of comm (floor 1). Recorder and spans write memory-mapped files that survive SIGKILL. Telemetry reads these files
and aligns hosts by the measured clock offsets. Begin with `flight_recorder.Recorder` and `flight_recorder.read`.
"""
