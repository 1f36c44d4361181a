"""Command line of hpcdist: one click command or group per module, imported only when it is called.

No module imports mpi4py, numpy, h5py, numba or matplotlib at module level: ``--help`` stays fast, and commands for
login nodes need no MPI. Code that a program without click could use is in `hpcdist.training.use_cases`. Start reading
with `main` and `run` (starting the ranks).
"""
