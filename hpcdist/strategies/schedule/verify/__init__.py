"""Proof that the operation lists of all ranks are one training step: no deadlock, nothing lost or done twice.

Floor 4; imports the operations, the placement and the grid, runs no model. `rank_checks` and `liveness` look at one
rank, `deadlock` at all of them together; `liveness.prove` takes orders of passes, before there are units. Begin with
`proof.verify` and `deadlock.DryRun`.
"""
