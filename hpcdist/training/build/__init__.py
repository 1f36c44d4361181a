"""Assembly of a run from its recipe.

May import `recipe`, `data`, the step observers in `observe`, and the packages below training. Begin with
`assemble.assemble` and `trainer.Trainer`.
"""
