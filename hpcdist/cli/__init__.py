"""Command line of hpcdist: one click command or group per module, loaded when it is called.

Floor 7, the top: it may import every other package, and only `hpcdist.__main__` imports it. Nothing heavy (mpi4py,
numpy, h5py, numba, matplotlib) is imported at module level, so that ``--help`` is instant and commands for login nodes
need no MPI. What a service without click could use lives below: `hpcdist.training.use_cases`.
Begin with `main` (the table of commands, errors and exit codes) and `run` (how ranks are started).
"""
