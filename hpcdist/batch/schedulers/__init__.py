"""Schedulers: submit, query and cancel jobs by the commands of Slurm and PBS, or without a scheduler.

Start reading with `base.JobState` and `dispatch.states`.
"""
