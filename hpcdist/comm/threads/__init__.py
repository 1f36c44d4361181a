"""Thread transport: N ranks as threads of one process, and the communicator of a single rank.

Tests run every algorithm on it without mpiexec. Begin with `communicator.run_threads` and `communicator.solo`.
"""
