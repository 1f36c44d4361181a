"""The command `hpcdist doctor`: checks of this machine and installation, each with its cure.

Part of `hpcdist.cli`, floor 7: it may import every package below. The checks of MPI, nodes and binding are those of
`hpcdist.comm`. Begin with `command` (this machine) and `job.examine` (the ranks of a batch job).
"""
