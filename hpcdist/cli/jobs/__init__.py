"""The `hpcdist jobs` commands: status, log, cancel and report for people; begin and end for job scripts.

They load neither MPI nor HDF5, because they run on login nodes and at every start of a job. Start reading with `lookup`
and `begin` (whether a start trains and is requeued).
"""
