"""The process that opens a foreign file: `python -m hpcdist.checkpoint.foreign_child FORMAT PATH`.

It confines itself, opens the file, and tells on stdout what is in it; then it answers requests on stdin, a line of JSON
``[index, start, stop]`` in elements of a tensor, with their bytes. Everything it says is a frame: eight bytes of length
(little-endian) with the highest bit set for an error, whose text follows. See `hpcdist.checkpoint.foreign`.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.checkpoint import safetensors, torch_state
from hpcdist.checkpoint.catalogue import PARAMETERS
from hpcdist.checkpoint.sandbox import confine
from hpcdist.errors import MissingCapabilityError
from hpcdist.hdf5.overlay import pread_all
from hpcdist.reporting import regular

ERROR: Final = 1 << 63
LACKING: Final = 1 << 62  # beside it: the library is not installed
SLACK_BYTES: Final = 1 << 30  # address space beyond twice the file: for the program that reads it
BYTES_PER_CPU_S: Final = 20_000_000
LEAST_CPU_S: Final = 60
MOST_INDEX_BYTES: Final = 100_000_000


class Source(Protocol):
    """An open file."""

    tensors: list[dict[str, Any]]  # kind, name, dtype, shape
    metadata: str
    left_out: list[str]

    def read(self, index: int, start: int, stop: int) -> bytes | memoryview:
        """Return the bytes of elements ``start`` to ``stop`` of a tensor."""
        ...


class SafetensorsSource:
    """One file, or those that an index names."""

    def __init__(self, path: Path) -> None:
        self.tensors: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self.metadata = ""
        self._places: list[tuple[int, safetensors.Place]] = []
        for file in _files(path):
            fd = regular.open_regular(file)
            found, metadata = safetensors.read_header(fd)
            self.metadata = self.metadata or metadata.get(safetensors.OURS, "")
            for name, place in found.items():
                kind, tensor = (PARAMETERS, name) if not metadata.get(safetensors.OURS) else _kind_of(name)
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
    told = regular.json_value(path, MOST_INDEX_BYTES)
    names = set(told["weight_map"].values()) if isinstance(told, dict) else set()
    strange = [name for name in names if not isinstance(name, str) or Path(name).name != name or name.startswith(".")]
    if strange or not names:
        raise ValueError(f"the index names {str(strange[:1])[:80]}, expected files beside it")
    return [path.with_name(name) for name in sorted(names)]


class TorchSource:
    """A file of ``torch.save``."""

    def __init__(self, path: Path) -> None:
        found, self.metadata, self.left_out = torch_state.read(path)
        self._values = list(found.values())
        self.tensors = [
            {
                "kind": kind,
                "name": name,
                "dtype": str(value.dtype).removeprefix("torch."),
                "shape": tuple(value.shape),
            }
            for (kind, name), value in found.items()
        ]
        self._flat: tuple[int, np.ndarray | None] = (-1, None)

    def read(self, index: int, start: int, stop: int) -> memoryview:
        """Return the bytes of elements ``start`` to ``stop`` of a tensor; the last one stays as it was read."""
        if self._flat[0] != index:
            value = self._values[index].contiguous().reshape(-1)
            self._flat = index, value.view(torch_state.torch().uint8).numpy()
        width, flat = self._values[index].element_size(), self._flat[1]
        assert flat is not None
        return flat[start * width : stop * width].data


SOURCES: Final[dict[str, Callable[[Path], Source]]] = {"safetensors": SafetensorsSource, "torch": TorchSource}


def size_of(path: Path) -> int:
    """Return the bytes of the file at ``path``, or, of an index, of all files of its format beside it."""
    beside = path.parent.glob("*" + safetensors.SUFFIX) if path.name.endswith(safetensors.INDEX_SUFFIX) else [path]
    return sum(file.stat().st_size for file in beside)


def main(arguments: Sequence[str]) -> None:
    """Confine this process, open the file and serve it until stdin ends."""
    kind, path = arguments[0], Path(arguments[1])
    out = sys.stdout.buffer
    try:
        if kind == "torch":
            torch_state.torch()  # from its own files, before nothing may be opened for writing any more
        nbytes = size_of(path)
        open_to = confine(2 * nbytes + SLACK_BYTES, LEAST_CPU_S + nbytes // BYTES_PER_CPU_S)
        source = SOURCES[kind](path)
        told = {
            "tensors": source.tensors,
            "metadata": source.metadata,
            "left_out": source.left_out,
            "not_confined": open_to,
        }
        _say(out, json.dumps(told).encode())
        for line in sys.stdin.buffer:
            _say(out, source.read(*json.loads(line)))
    except BrokenPipeError:
        return
    except MissingCapabilityError as error:
        _say(out, str(error).encode()[:500], ERROR | LACKING)
    except Exception as error:  # noqa: BLE001 - the parent tells, whatever a hostile file makes of a library
        reason = str(error).strip().splitlines() or [""]
        _say(out, f"{type(error).__name__}: {reason[0][:500]}".encode(), ERROR)


def _say(out: Any, data: bytes | memoryview, flag: int = 0) -> None:
    out.write((len(data) | flag).to_bytes(8, "little"))
    out.write(data)
    out.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
