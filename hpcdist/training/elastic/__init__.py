"""Elastic training: a job that goes on when ranks die or come, as `hpcdist run --survive` starts it.

It needs an MPI library with User Level Failure Mitigation (ULFM). It may import `run`, `build`, `observe`, `data` and
`recipe`; nothing but the entry point imports it. Begin with `job.ElasticJob` (the loop over incarnations) and
`membership.Membership` (who trains, who is a spare).
"""
