"""GPU support: the device, pinned memory and compiled kernels.

Part of arrays (floor 0). `device` is the only importer of cupy; the rest is built on it: `staging` copies between
host and GPU through pinned memory, `kernels` compiles CUDA C++. Begin with `device.cupy` and `staging.lease`.
"""
