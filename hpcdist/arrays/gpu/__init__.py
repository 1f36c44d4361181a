"""GPU support: the device, pinned memory, compiled kernels and CUDA graphs.

Part of arrays (floor 0). `device` is the only importer of cupy. Begin with `device.cupy` and `staging.lease`.
"""
