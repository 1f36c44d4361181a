"""MPI transport: the communicator over mpi4py, fault tolerance (ULFM), shared memory and GPU pointers.

`comm.start` passes mpi4py to these modules. Begin with `communicator.MpiCommunicator` and `ulfm.is_enabled`.
"""
