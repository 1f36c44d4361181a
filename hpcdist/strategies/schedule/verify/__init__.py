"""Proof that the operation lists of all ranks form one training step: no deadlock, nothing lost or done twice.

Floor 4; imports operations, placement and grid, runs no model. `rank_checks` and `liveness` check one rank, `deadlock`
all ranks; `liveness.prove` checks orders of passes. Begin with `proof.verify` and `deadlock.DryRun`.
"""
