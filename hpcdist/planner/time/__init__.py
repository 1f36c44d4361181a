"""Time of a step: computation, collectives, pipeline bubble, exchange of gradients, update.

Start reading with `step.timing` (the critical path) and `network.collective`.
"""
