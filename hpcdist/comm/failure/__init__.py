"""Failures of ranks: fail-fast, fault tolerance, detection and deadlines.

Part of comm (floor 1). By default a rank that fails takes the job with it, with its traceback in front (`failfast`).
With ULFM the survivors revoke, agree and shrink (`fault_tolerant`). The watchdog ends a job that hangs.
Begin with `failfast.install` and `rank_failures.is_rank_failure`.
"""
