"""Power limits and clocks of GPUs and processors: changed temporarily, journalled, and always restored.

Only for requests (`hpcdist bench power`). Begin with `apply.limited` and `devices.DeviceLimit`.
"""
