"""The `hpcdist submit` command: a recipe, sweep, benchmark or program as a batch job of the site.

Part of `hpcdist.cli`, floor 7: it may import every package below, and loads neither MPI nor HDF5: it runs on login
nodes. The job itself is made by `hpcdist.training.use_cases.batch_job`, and written and submitted by `hpcdist.batch`.
Begin with `command` (options and submission) and `kinds` (jobs other than a training).
"""
