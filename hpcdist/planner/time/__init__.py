"""Time of a step: computation, collectives, pipeline bubble, exchange of gradients, update.

Imports `cluster`, `model`, `memory`, `layout` and `estimate` of the planner. `network` has the costs of links,
messages and collectives, `compute` and `stage_load` those of a micro-batch, `pipeline` and `exchange` those of a
step. Begin with `step.timing` (the critical path) and `network.collective`.
"""
