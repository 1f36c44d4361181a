"""Command line of hpcdist: one click command or group per module, imported only when it is called.

This package may import every other package; only `hpcdist.__main__` imports it. No module imports mpi4py, numpy, h5py,
numba or matplotlib at module level: ``--help`` stays fast, and commands for login nodes need no MPI.
Code that a program without click could use is in `hpcdist.training.use_cases`.
Start reading with `main` (table of commands, errors, exit codes) and `run` (starting the ranks).
"""
