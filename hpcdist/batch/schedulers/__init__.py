"""Schedulers: submit, query and cancel jobs by the commands of Slurm and PBS, or without a scheduler.

Part of `hpcdist.batch`; imports its ledger, reporting and errors, never a job or a site. `dispatch` finds the
scheduler of a job by its id.
Begin with `base.JobState` and `dispatch.states`.
"""
