"""Elastic training (`hpcdist run --survive`): the job continues when ranks die or join.

Needs an MPI library with User Level Failure Mitigation (ULFM). May import `run`, `build`, `observe`, `data` and
`recipe`; only the entry point imports it. Begin with `job.ElasticJob` (restarts the training on the surviving ranks)
and `membership.Membership` (training ranks and spares).
"""
