"""Proof that the operation lists of all ranks form one training step: no deadlock, nothing lost or done twice.

Floor 4. `rank_checks` and `liveness` check one rank, `deadlock` all ranks. Begin with `proof.verify`.
"""
