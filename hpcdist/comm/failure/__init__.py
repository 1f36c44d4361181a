"""Failures of ranks: fail-fast, fault tolerance, detection and deadlines.

Part of comm (floor 1). By default a failed rank prints its traceback and ends the job (`failfast`). With ULFM the
survivors revoke, agree and shrink (`rank_failures.FaultTolerant`). The `watchdog` ends a job that hangs. Begin with
`failfast.install` and `rank_failures.is_rank_failure`.
"""
