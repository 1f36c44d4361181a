"""Slurm: submit jobs, query the queue and accounting, sum up energy, and probe the nodes of an allocation.

Uses only Slurm's commands. Start reading with `submit.submit` and `queue.queued`.
"""
