"""The `hpcdist submit` command: submit a recipe, sweep, benchmark or program as a batch job.

It runs on login nodes, so it loads neither MPI nor HDF5. Start reading with `command`, then `kinds` (other jobs).
"""
