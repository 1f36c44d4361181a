"""Memory of a device: model states, activations, collective buffers, scratch.

Start reading with `device.memory` (the total) and `model_states.states` (bytes per parameter).
"""
