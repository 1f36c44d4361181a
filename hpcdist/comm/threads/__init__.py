"""Thread transport: N ranks as threads of one process, and the communicator of a single rank.

Part of comm (floor 1). Every algorithm can be tested with it at any size without mpiexec, also with ranks that die.
Begin with `communicator.run_threads` and `communicator.solo`.
"""
