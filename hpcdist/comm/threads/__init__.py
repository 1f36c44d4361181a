"""Thread transport: N ranks as threads of one process, and the communicator of a single rank.

Part of comm (floor 1). Tests run every algorithm on it at any size without mpiexec, also with ranks that die.
Begin with `communicator.run_threads` and `communicator.solo`.
"""
