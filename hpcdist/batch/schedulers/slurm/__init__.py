"""Slurm: submit jobs, query the queue and accounting, sum up energy, and probe the nodes of an allocation.

Start reading with `submit.submit` and `queue.queued`.
"""
