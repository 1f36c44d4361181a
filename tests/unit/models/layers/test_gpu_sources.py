"""The kernel sources under NVIDIA's compilers: for each GPU generation, without significant register spills."""

import ctypes
import re
import shutil
import sys
from pathlib import Path

import pytest

from harness import jobs
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.gpu.kernels import OPTIONS, KernelSource
from hpcdist.models.attention import flash
from hpcdist.models.attention import kernels as attention_kernels
from hpcdist.models.experts import kernels as expert_kernels
from hpcdist.models.layers import cuda_kernels
from hpcdist.optim import kernels as updates

UPDATES = {"GRADIENT": dtype_of("bfloat16"), "WORKING": dtype_of("bfloat16")}
SOURCES = {
    "activation": (cuda_kernels.ACTIVATION, {}),
    "norm": (cuda_kernels.NORM, {}),
    "cross entropy": (cuda_kernels.CROSS_ENTROPY, {}),
    "embedding": (cuda_kernels.EMBEDDING, {}),
    "softmax": (attention_kernels.SOFTMAX, {}),
    "experts": (expert_kernels.EXPERTS, {}),
    "updates": (updates.CUDA_SOURCE, UPDATES),
    "attention": (flash.FUSED_KERNELS, {"HEAD": 64}),
    "attention of large heads": (flash.FUSED_KERNELS, {"HEAD": 128}),
}
OF_CUPY = ("--device-as-default-execution-space", "-ftz=true")  # options that cupy adds to all
SPILLED_BYTES = 64  # a thread, at most


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.full
def test_nvcc_compiles_every_source(name, tmp_path):
    """Needs nvcc but no GPU."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("no nvcc on this machine")
    source, types = SOURCES[name]
    real = "float32" if name == "updates" else "bfloat16"
    text = tmp_path / "kernels.cu"
    text.write_text(source.code(REAL=dtype_of(real), **types))
    command = [compiler, "-std=c++17", "-arch=sm_80", "-cubin", "-Xptxas=-v", "-Werror=all-warnings", str(text)]
    done = jobs.run([*command, "-o", str(tmp_path / "kernels.cubin")])
    assert done.returncode == 0, done.stderr
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", done.stderr)]
    assert len(spilled) == len(re.findall(r'extern "C" __global__', source.path.read_text()))
    assert max(spilled) <= SPILLED_BYTES


@pytest.mark.parametrize("name", SOURCES)
def test_nvrtc_compiles_every_source(name):
    """Needs NVRTC but no GPU. NVRTC has no headers, and other rules for functions than nvcc."""
    library = _nvrtc()
    if library is None:
        pytest.skip("no NVRTC on this machine: pip install nvidia-cuda-nvrtc-cu12")
    source, types = SOURCES[name]
    program, code = (
        ctypes.c_void_p(),
        source.code(REAL=dtype_of("float32" if name == "updates" else "float16"), **types),
    )
    assert library.nvrtcCreateProgram(ctypes.byref(program), code.encode(), b"kernels.cu", 0, None, None) == 0
    given = [option.encode() for option in (*OPTIONS, *OF_CUPY, "-arch=sm_80")]
    failed = library.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert not failed, log.value.decode()


def _nvrtc():
    """Return the NVRTC library from a Python package or from the system."""
    places = [Path(folder) / "nvidia" for folder in sys.path]
    results = sorted(str(path) for place in places if place.is_dir() for path in place.rglob("libnvrtc.so.1*"))
    for name in (*results, *(f"libnvrtc.so.{number}" for number in (12, 13))):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def test_source_rejects_unsupported_types_with_the_reason():
    with pytest.raises(Exception, match=r"kernels of attention.cu do not support float32; use float16 or bfloat16"):
        flash.FUSED_KERNELS.code(REAL=dtype_of("float32"), HEAD=16)
    assert isinstance(cuda_kernels.NORM, KernelSource) and cuda_kernels.NORM.takes(dtype_of("float64"))
