"""MPI transport: the communicator over mpi4py, fault tolerance (ULFM), shared memory and GPU pointers.

Part of comm (floor 1). `comm.start` imports mpi4py when a job starts, and passes it to these modules.
Begin with `communicator.MpiCommunicator`, and `ulfm.is_enabled` for fault tolerance.
"""
