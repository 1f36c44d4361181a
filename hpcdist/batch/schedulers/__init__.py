"""Schedulers: submit, query and cancel jobs by the commands of Slurm and PBS, or without a scheduler.

`dispatch` selects the scheduler of a job by its id. Start reading with `base.JobState` and `dispatch.states`.
"""
