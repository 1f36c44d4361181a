"""Training of one run: recipe, data, assembly, loop, observers and survival of rank failures.

Floor 6: it may import every package below (strategies, checkpoint, energy, telemetry, planner, batch) and never
`hpcdist.cli`. Sub-packages from the bottom: `recipe`, `data`, `chaos`, `build`, `observe`, `run`, `elastic`; above
them `script` and `pytorch`, the doors for a user's own script, and `use_cases`, which the commands call. Begin with
`recipe.recipe.Recipe` (what a run is) and `build.trainer.Trainer` (what makes its steps).
"""
