"""The `hpcdist plan` commands, and `hpcdist schedule`: what a training needs, before anything is started.

Part of `hpcdist.cli`, floor 7: it may import every package below. The formulas are in `hpcdist.planner`; a recipe is
translated by `hpcdist.training.use_cases.recipe_plan`. Only `calibrate` measures, and may run on ranks.
Begin with `group` (the plan of one layout) and `subject` (from options to a model and its layout).
"""
