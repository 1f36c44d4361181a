"""Use cases of recipes and runs shared by several commands, callable without click.

Floor 6: may import the packages below, never `hpcdist.cli`. Begin with `batch_job.plan_training` and `plan.plan`.
"""
