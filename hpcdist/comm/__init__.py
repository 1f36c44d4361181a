"""Communicators over MPI, over threads or of one rank, and the launch, failure and record of the ranks.

Floor 1: imports arrays, reporting and errors; the only importer of mpi4py. `mpi` and `threads` are the two
transports, `launch` starts and supervises ranks, `failure` ends a job in which a rank fails or lets the others go on,
`record` logs the operations of each rank, `doctor` checks an installation and a job.
Begin with `communicator.Communicator`, which all algorithms use, and `start.start`, which entry points call once.
"""
