"""Time of a step: computation, collectives, pipeline bubble, exchange of gradients, update.

Imports `cluster`, `model`, `memory`, `layout` and `estimate` of the planner. `topology` and `network` are the costs
of messages, `compute` and `stage_load` those of a micro-batch, `pipeline` and `exchange` those of a step. Begin with
`step.timing` (the critical path) and `network.collective`.
"""
