"""Use cases of recipes and runs that several services share, callable without click.

Floor 6, as all of `hpcdist.training`: it may import the packages below (planner, batch, energy, telemetry and what is
under them), and never `hpcdist.cli`, whose commands call it.
Begin with `batch_job.plan_training` (a recipe as a job of a site) and `plan.plan` (`hpcdist.plan`: memory, time and
energy of a recipe, or of a model in numbers).
"""
