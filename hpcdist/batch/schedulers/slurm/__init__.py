"""Slurm: submit jobs, query the queue and the accounts, add up energy, and watch the nodes of an allocation.

Part of `hpcdist.batch.schedulers`; uses Slurm's commands only.
Begin with `submit.submit` and `queue.queued`.
"""
