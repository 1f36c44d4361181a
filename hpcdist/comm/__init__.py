"""Communicators over MPI, over threads or of one rank, and the launch, failure and record of ranks.

Floor 1: imports arrays, reporting and errors; the only importer of mpi4py. `mpi` and `threads` are the transports,
`launch` starts and supervises ranks, `failure` handles failed ranks, `record` logs each rank's operations, `doctor`
checks an installation and a job. Begin with `communicator.Communicator` and `start.start`.
"""
