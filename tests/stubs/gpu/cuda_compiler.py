"""Kernels of the double: CUDA C++ for cupy, compiled for the host and run on host memory.


Some errors that a GPU accepts silently are rejected: an argument of the wrong type, a wrong number of arguments, a
block of more than 1024 threads, and memory that does not belong to the device. A launch counts as a kernel on the
current stream that writes every array it is given.
"""

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from stubs.gpu import cuda_double

SHIM = Path(__file__).with_name("cuda_host.hpp")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")
KERNEL = re.compile(r'extern "C" __global__ void(?:\s+__launch_bounds__\([^)]*\))?\s+(\w+)\s*\(([^)]*)\)', re.DOTALL)
TYPES = {
    "float": np.float32,
    "double": np.float64,
    "float16": np.float16,
    "bfloat16": bfloat16,
    "long long": np.int64,
    "int": np.int32,
    "unsigned": np.uint32,
    "unsigned char": np.uint8,
    "unsigned short": np.uint16,
}
LAUNCHES: list[str] = []  # names, in order
BLOCKS_ACROSS = 65535  # CUDA's limit for the second and the third number of a grid
_lock = threading.Lock()  # the fibres of a library are there once


def _parameters(code: str, name: str) -> list[tuple[str, bool]]:
    """Return (type, is_pointer) for each parameter of kernel ``name``."""
    macros = dict(re.findall(r"#define (\w+) ([\w ]+)\n", code))
    macros["ACC"] = "double" if macros.get("REAL") == "double" else "float"
    results = dict(KERNEL.findall(code))
    if name not in results:
        raise AttributeError(f"no kernel {name} in this code, only {', '.join(results)}")
    parameters = []
    for argument in results[name].split(","):
        kind = re.sub(r"\b(const|__restrict__)\b", "", argument.rpartition(" ")[0] + " ").strip()
        pointer = "*" in argument
        plain = " ".join(kind.replace("*", " ").split())
        parameters.append((macros.get(plain, plain), pointer))
    return parameters


def _launcher(name: str, parameters: list[tuple[str, bool]]) -> str:
    arguments = ", ".join(
        f"({kind}*)given[{number}]" if pointer else f"*({kind}*)given[{number}]"
        for number, (kind, pointer) in enumerate(parameters)
    )
    return (
        f'\nextern "C" const char* launch_{name}(const unsigned* blocks, const unsigned* threads, void** given) {{\n'
        f"  return host::run(blocks, threads, [=] {{ {name}({arguments}); }});\n}}\n"
    )


@functools.cache
def _library(code: str) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler: the kernels of a GPU cannot be run on this machine")
    launchers = "".join(_launcher(name, _parameters(code, name)) for name, _ in KERNEL.findall(code))
    text = f'#include "{SHIM}"\n{code}{launchers}'
    digest = hashlib.blake2b((text + SHIM.read_text() + " ".join(FLAGS)).encode(), digest_size=12).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"hpcdist-doubles-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / f"{digest}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            source, made = Path(scratch) / "kernels.cpp", Path(scratch) / "kernels.so"
            source.write_text(text)
            command = [compiler, *FLAGS, str(source), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            if done.returncode:
                raise RuntimeError(f"{done.stderr[:4000]}")
            made.replace(target)  # another process may have done the same
    return ctypes.CDLL(str(target))


class RawKernel:
    """`cupy.RawKernel`: compiled at the first launch."""

    def __init__(self, code: str, name: str, options: tuple[str, ...] = (), backend: str = "nvrtc") -> None:
        assert set(options) <= {"--std=c++17"}, options
        self.code, self.name = code, name
        self._parameters = _parameters(code, name)

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        sizes = []
        for size in (grid, block):
            if not (isinstance(size, tuple) and 1 <= len(size) <= 3 and all(number > 0 for number in size)):
                raise ValueError(f"got a grid or block of {size}")
            sizes.append((ctypes.c_uint * 3)(*size, *(1,) * (3 - len(size))))
        if np.prod(block) > 1024 or max((*grid, 1)[1:], default=1) > BLOCKS_ACROSS:
            raise cuda_double.CUDARuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        if len(args) != len(self._parameters):
            raise TypeError(f"{self.name} has {len(self._parameters)} parameters, and got {len(args)} arguments")
        arrays: dict[int, np.ndarray] = {}  # by the number of their argument
        scalars: dict[int, np.ndarray] = {}
        for number, (arg, (kind, pointer)) in enumerate(zip(args, self._parameters, strict=True)):
            expected = np.dtype(TYPES[kind])
            if arg.dtype != expected or pointer == isinstance(arg, np.generic):
                wish = f"{expected}{' in memory of the device' if pointer else ''}"
                raise TypeError(f"argument {number} of {self.name} is {type(arg)} {arg.dtype}; it takes {wish}")
            if pointer:
                arrays[number] = arg._raw
            else:
                scalars[number] = np.array(arg)
        launch = getattr(_library(self.code), f"launch_{self.name}")
        launch.restype = ctypes.c_char_p

        count, places = len(args), list(arrays)  # a graph does not keep the memory of its kernels

        def work(*local_data: np.ndarray) -> None:
            given = (ctypes.c_void_p * count)()
            for number, array in (*zip(places, local_data, strict=True), *scalars.items()):
                given[number] = array.ctypes.data
            with _lock:
                wrong = launch(*sizes, given)
                LAUNCHES.append(self.name)
            if wrong:
                raise cuda_double.CUDARuntimeError(f"{self.name}: {wrong.decode()}")

        cuda_double.run(work, list(arrays.values()), range(len(arrays)))
