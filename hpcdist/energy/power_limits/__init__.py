"""Power limits and clocks of GPUs and processors: changed temporarily, journalled, and always restored.

Used only by `python -m benchmarks power`. Begin with `apply.limited` and `devices.DeviceLimit`.
"""
