"""The command `hpcdist doctor`: checks of this machine and installation, each with a cure.

Start reading with `command` (this machine) and `job.examine` (the ranks of a batch job). `hpcdist.comm.doctor`
implements the checks.
"""
