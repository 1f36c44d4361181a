"""Batch jobs: job scripts, their submission to Slurm, PBS or a workstation, and requeue decisions.

Starts no MPI, and is fast to import on a login node. `ledger.decide` makes the decision that `hpcdist jobs end` prints
and the block ``again`` of slurm/templates/slurm.j2 carries out. Start reading with `job.BatchJob` and
`submission.submit`.
"""
