"""GPU support: the device, pinned memory, compiled kernels and CUDA graphs.

Part of arrays (floor 0). `device` is the only importer of cupy. `staging` copies between host and GPU through pinned
memory, `kernels` compiles CUDA C++, `graphs` captures CUDA graphs. Begin with `device.cupy` and `staging.lease`.
"""
