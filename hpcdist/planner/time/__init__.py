"""Time of a step: computation, collectives, pipeline bubble, exchange of gradients, update.

`network` has the costs of links, messages and collectives, `compute` and `stage_load` of a micro-batch, `pipeline` and
`exchange` of a step. Start reading with `step.timing` (the critical path) and `network.collective`.
"""
