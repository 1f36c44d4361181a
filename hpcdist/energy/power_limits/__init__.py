"""Power limits and clocks of GPUs and processors: changed for a while, journalled, and always put back.

Imports `sources` (NVML and RAPL), comm and errors. Runs only when a user asks for it (`hpcdist bench power`).
Begin with `apply.limited` and `devices.DeviceLimit`.
"""
