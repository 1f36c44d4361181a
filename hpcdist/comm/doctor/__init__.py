"""Diagnosis of an MPI installation and of a batch job, for `hpcdist doctor`.

Each rank reads its `facts`, `gather` sends them to rank 0, and the checks are pure functions of the gathered rows.
Begin with `mpi_library.check_library_and_launcher` and `gather.gather`.
"""
