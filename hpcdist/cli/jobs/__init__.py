"""The `hpcdist jobs` commands: status, log, cancel and report for people; begin and end for job scripts.

Part of `hpcdist.cli`, floor 7: it may import every package below, and loads neither MPI nor HDF5: it runs on login
nodes and at every start of a job. The records are the ledger of each run (`batch.ledger`) and the accounts of the
scheduler. Begin with `lookup` (from the words of a command line to jobs) and `begin` (whether a start
trains, and is requeued).
"""
