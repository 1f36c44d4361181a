"""The `hpcdist plan` commands and `hpcdist schedule`: predict a training before anything is started.

The formulas are in `hpcdist.planner`; `hpcdist.training.use_cases.recipe_plan` translates a recipe. Only `calibrate`
measures, and may run on ranks. Start reading with `group` (plan one layout) and `options`.
"""
