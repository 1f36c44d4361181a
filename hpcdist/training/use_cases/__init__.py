"""Use cases of recipes and runs shared by several commands, callable without click.

Floor 6: may import the packages below (planner, batch, energy, telemetry, ...), never `hpcdist.cli`. Begin with
`batch_job.plan_training` (a recipe as a batch job) and `plan.plan` (`hpcdist.plan`: memory, time and energy).
"""
