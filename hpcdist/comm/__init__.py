"""Communicators over MPI, over threads or of one rank, and the launch, failure and record of ranks.

Floor 1: imports arrays, reporting and errors; the only importer of mpi4py. `mpi` and `threads` are the transports,
`launch` starts and supervises ranks, and `failure` handles failed ranks. Begin with `communicator.Communicator` and
`start.start`.
"""
