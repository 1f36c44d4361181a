"""The `hpcdist submit` command: submit a recipe, sweep, benchmark or program as a batch job.

It runs on login nodes, so it loads neither MPI nor HDF5. `hpcdist.training.use_cases.batch_job` plans the job;
`hpcdist.batch` writes and submits it. Start reading with `command` and `kinds` (jobs other than a training).
"""
