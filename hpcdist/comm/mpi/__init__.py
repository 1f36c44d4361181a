"""MPI transport: the communicator over mpi4py, fault tolerance (ULFM), shared memory and GPU pointers.

Part of comm (floor 1). mpi4py is imported by `comm.start` when a job starts, never at import of these modules; it is
handed to them as an argument.
Begin with `communicator.MpiCommunicator`, and `ulfm.is_enabled` for fault tolerance.
"""
