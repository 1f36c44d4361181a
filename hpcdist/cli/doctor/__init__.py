"""The command `hpcdist doctor`: checks of this machine and installation, each with a cure.

The checks of MPI, nodes and binding are implemented in `hpcdist.comm.doctor`.
Start reading with `command` (this machine) and `job.examine` (the ranks of a batch job).
"""
