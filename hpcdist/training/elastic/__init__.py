"""Elastic training (`hpcdist run --survive`): the job continues when ranks die or join.

May import `run`, `build`, `observe`, `data` and `recipe`; only the entry point imports it. Begin with `job.ElasticJob`
and `membership.Membership`.
"""
