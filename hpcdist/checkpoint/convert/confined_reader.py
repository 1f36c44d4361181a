"""Confined process (seccomp, rlimits) that opens a foreign file and serves its tensors through a pipe.

Started as `python -m hpcdist.checkpoint.convert.confined_reader FORMAT PATH`. It confines itself, opens the file, and
writes to stdout what is in it; then it answers requests on stdin, a line of JSON ``[index, start, stop]`` in elements
of a tensor, with their bytes. Every answer is a frame: eight bytes of length (little-endian) with the highest bit set
for an error, whose text follows. See `hpcdist.checkpoint.convert.importing`.

`confine` (Linux) limits address space and processor seconds; lets no byte be written to any file; and, by a seccomp
filter on all threads, allows no socket, no program started, no file removed, renamed or changed. What is open already
stays usable. There is no way back: it is for a process that does nothing else.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.checkpoint.convert import safetensors, torch_state
from hpcdist.checkpoint.listing import PARAMETERS
from hpcdist.errors import MissingCapabilityError
from hpcdist.hdf5.overlay import pread_all
from hpcdist.reporting import regular

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")

# audit number of the architecture, and of its system calls those that are refused (unistd.h of the kernel):
# socket connect sendto socketpair execve execveat kill truncate ftruncate rename* mkdir* rmdir creat link* unlink*
# symlink* mknod* chmod* chown* ptrace process_vm_writev io_uring_setup
_REFUSED: Final = {
    "x86_64": (
        0xC000003E,
        317,
        (
            *(41, 42, 44, 53, 59, 322, 62, 76, 77, 82, 264, 316, 83, 258, 84, 85, 86, 265, 87, 263, 88, 266),
            *(133, 259, 90, 91, 268, 92, 93, 94, 260, 101, 311, 425),
        ),
    ),
    "aarch64": (
        0xC00000B7,
        277,
        (198, 203, 206, 199, 221, 281, 129, 45, 46, 38, 276, 34, 37, 35, 36, 33, 52, 53, 54, 55, 117, 271, 425),
    ),
}
_X32: Final = 0x40000000  # numbers of another interface to the same kernel
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
_NO_NEW_PRIVILEGES, _SET_MODE_FILTER, _ALL_THREADS = 38, 1, 1


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def confine(memory_bytes: int, cpu_s: int) -> str:
    """Confine this process, with ``memory_bytes`` of address space beyond what it has and ``cpu_s`` more seconds.

    Returns the reason where no seccomp filter could be set, else "". Raises OSError when a limit cannot be set.
    """
    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[0]) * _PAGE
    used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + 1
    for kind, most in (
        (resource.RLIMIT_AS, held + memory_bytes),
        (resource.RLIMIT_CPU, used + cpu_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    return _refuse_calls()


def _refuse_calls() -> str:
    """Set the seccomp filter on all threads; return the reason where that is not possible, else ""."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _REFUSED:
        return f"the system calls of {sys.platform} on {machine} are not known here"
    audit, seccomp, refused = _REFUSED[machine]
    # A BPF program over struct seccomp_data: kill calls of another architecture (word at byte 4), refuse those of the
    # x32 interface, then compare the number (word at byte 0) with each refused one; a match falls into its RETURN,
    # anything else skips it.
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    lines += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _REFUSE)]
    for number in refused:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    lines.append((_RETURN, 0, 0, _ALLOW))
    program = (_Instruction * len(lines))(*(_Instruction(*line) for line in lines))
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(_NO_NEW_PRIVILEGES, ctypes.c_ulong(1), zero, zero, zero):
        return f"prctl: {os.strerror(ctypes.get_errno())}"
    filter_program = ctypes.byref(_Program(len(lines), program))
    if libc.syscall(
        ctypes.c_long(seccomp), ctypes.c_uint(_SET_MODE_FILTER), ctypes.c_uint(_ALL_THREADS), filter_program
    ):
        return f"seccomp: {os.strerror(ctypes.get_errno())}"
    return ""


ERROR_FLAG: Final = 1 << 63
MISSING_LIBRARY_FLAG: Final = 1 << 62  # beside it: the library is not installed
SLACK_BYTES: Final = 1 << 30  # address space beyond twice the file: for the program that reads it
BYTES_PER_CPU_S: Final = 20_000_000
MIN_CPU_S: Final = 60
MAX_INDEX_BYTES: Final = 100_000_000


class TensorReader(Protocol):
    """Protocol of an open foreign file."""

    tensors: list[dict[str, Any]]  # kind, name, dtype, shape
    metadata: str
    left_out: list[str]

    def read(self, index: int, start: int, stop: int) -> bytes | memoryview:
        """Return the bytes of elements ``start`` to ``stop`` of a tensor."""
        ...


class SafetensorsReader:
    """Reader of one safetensors file, or of those that an index names."""

    def __init__(self, path: Path) -> None:
        self.tensors: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self.metadata = ""
        self._places: list[tuple[int, safetensors.TensorLocation]] = []
        for file in _files(path):
            fd = regular.open_regular(file)
            locations, metadata = safetensors.read_header(fd)
            self.metadata = self.metadata or metadata.get(safetensors.METADATA_KEY, "")
            for name, place in locations.items():
                kind, tensor = (PARAMETERS, name) if not metadata.get(safetensors.METADATA_KEY) else _kind_of(name)
                self.tensors.append({"kind": kind, "name": tensor, "dtype": place.dtype, "shape": place.shape})
                self._places.append((fd, place))

    def read(self, index: int, start: int, stop: int) -> bytes:
        """Return the bytes of elements ``start`` to ``stop`` of a tensor."""
        fd, place = self._places[index]
        width = dtype_of(place.dtype).itemsize
        return pread_all(fd, (stop - start) * width, place.start + start * width)


def _kind_of(name: str) -> tuple[str, str]:
    kind, slash, tensor = name.partition("/")
    return (kind, tensor) if slash else (PARAMETERS, name)


def _files(path: Path) -> list[Path]:
    if not path.name.endswith(safetensors.INDEX_SUFFIX):
        return [path]
    index = regular.json_value(path, MAX_INDEX_BYTES)
    names = set(index["weight_map"].values()) if isinstance(index, dict) else set()
    strange = [name for name in names if not isinstance(name, str) or Path(name).name != name or name.startswith(".")]
    if strange or not names:
        raise ValueError(f"the index names {str(strange[:1])[:80]}, expected files beside it")
    return [path.with_name(name) for name in sorted(names)]


class TorchReader:
    """Reader of a file of ``torch.save``."""

    def __init__(self, path: Path) -> None:
        values_by_name, self.metadata, self.left_out = torch_state.read(path)
        self._values = list(values_by_name.values())
        self.tensors = [
            {
                "kind": kind,
                "name": name,
                "dtype": str(value.dtype).removeprefix("torch."),
                "shape": tuple(value.shape),
            }
            for (kind, name), value in values_by_name.items()
        ]
        self._flat: tuple[int, np.ndarray | None] = (-1, None)

    def read(self, index: int, start: int, stop: int) -> memoryview:
        """Return the bytes of elements ``start`` to ``stop`` of a tensor; the last one stays as it was read."""
        if self._flat[0] != index:
            value = self._values[index].contiguous().reshape(-1)
            self._flat = index, value.view(torch_state.import_torch().uint8).numpy()
        width, flat = self._values[index].element_size(), self._flat[1]
        assert flat is not None
        return flat[start * width : stop * width].data


READERS: Final[dict[str, Callable[[Path], TensorReader]]] = {"safetensors": SafetensorsReader, "torch": TorchReader}


def file_bytes(path: Path) -> int:
    """Return the bytes of the file at ``path``, or, of an index, of all files of its format beside it."""
    beside = path.parent.glob("*" + safetensors.SUFFIX) if path.name.endswith(safetensors.INDEX_SUFFIX) else [path]
    return sum(file.stat().st_size for file in beside)


def main(arguments: Sequence[str]) -> None:
    """Confine this process, open the file and serve it until stdin ends."""
    kind, path = arguments[0], Path(arguments[1])
    out = sys.stdout.buffer
    try:
        if kind == "torch":
            torch_state.import_torch()  # from its own files, before nothing may be opened for writing any more
        nbytes = file_bytes(path)
        open_to = confine(2 * nbytes + SLACK_BYTES, MIN_CPU_S + nbytes // BYTES_PER_CPU_S)
        source = READERS[kind](path)
        contents = {
            "tensors": source.tensors,
            "metadata": source.metadata,
            "left_out": source.left_out,
            "not_confined": open_to,
        }
        _send_frame(out, json.dumps(contents).encode())
        for line in sys.stdin.buffer:
            _send_frame(out, source.read(*json.loads(line)))
    except BrokenPipeError:
        return
    except MissingCapabilityError as error:
        _send_frame(out, str(error).encode()[:500], ERROR_FLAG | MISSING_LIBRARY_FLAG)
    except Exception as error:  # noqa: BLE001 - the parent tells, whatever a hostile file makes of a library
        reason = str(error).strip().splitlines() or [""]
        _send_frame(out, f"{type(error).__name__}: {reason[0][:500]}".encode(), ERROR_FLAG)


def _send_frame(out: Any, data: bytes | memoryview, flag: int = 0) -> None:
    out.write((len(data) | flag).to_bytes(8, "little"))
    out.write(data)
    out.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
