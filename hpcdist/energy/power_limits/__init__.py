"""Power limits and clocks of GPUs and processors: changed temporarily, journalled, and always restored.

Floor 5, inside energy: imports `sources` (NVML and RAPL), comm and errors. Only for requests (`hpcdist bench power`).
Begin with `apply.limited` and `devices.DeviceLimit`.
"""
