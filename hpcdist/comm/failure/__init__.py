"""Failures of ranks: fail-fast, fault tolerance, detection and deadlines.

By default a failed rank ends the job. With ULFM the survivors revoke, agree and shrink. Begin with `failfast.install`
and `rank_failures.is_rank_failure`.
"""
