"""Memory of a device: model states, activations, buffers of collectives, scratch.

Imports `cluster`, `model`, `layout` and `estimate` of the planner; the buffers of compressed exchanges also need
`time.gradient_payloads`. Begin with `device.memory` (the total) and `model_states.states` (bytes a parameter).
"""
