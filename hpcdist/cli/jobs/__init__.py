"""The `hpcdist jobs` commands: status, log, cancel and report for people; begin and end for job scripts.

They load neither MPI nor HDF5, because they run on login nodes and at every start of a job. Data sources: the ledger of
each run (`batch.ledger`) and the accounting of the scheduler. Start reading with `lookup` (find jobs by the words of a
command line) and `begin` (whether a start trains and is requeued).
"""
