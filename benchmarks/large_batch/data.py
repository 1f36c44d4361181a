"""Images as tables of pixels and classes: scikit-learn's digits, MNIST files and CIFAR files.

MNIST (LeCun, Cortes & Burges) and datasets of the same format (Fashion-MNIST): big-endian idx files, plain or gzipped;
magic 0x803 (bytes, three dims) for images and 0x801 (bytes, one dim) for labels. CIFAR (Krizhevsky 2009): .bin files of
records; 3,072 bytes of pixels after one label byte (CIFAR-10) or two, coarse and fine (CIFAR-100).
"""

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from hpcdist.errors import DataError, MissingCapabilityError
from hpcdist.hdf5 import files

PIXELS: Final = 3072  # 32 x 32, three colours
IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
EXPECTED: Final = (
    f"expected a directory with train-{IMAGES} and train-{LABELS}, and t10k-{IMAGES} and t10k-{LABELS} to validate "
    "with (MNIST; each may end in .gz), or data_batch_1.bin to data_batch_5.bin and test_batch.bin (CIFAR-10), or "
    "train.bin and test.bin (CIFAR-100)"
)


@dataclass(frozen=True)
class Table:
    """Pixels ``x`` (rows, ...) and classes ``y`` (rows,); the last ``validation`` rows are only for validation."""

    name: str
    x: np.ndarray
    y: np.ndarray
    validation: int

    def write(self, path: Path) -> None:
        """Write the table in the format that a training reads."""
        files.write_contiguous(path, {"x": self.x, "y": self.y}, {}, schema="hpcdist.benchmark.table", version=1)


def digits() -> Table:
    """Return scikit-learn's 1,797 digits of 8 x 8 pixels in random order. Raises MissingCapabilityError.

    The original order ends with digits of only a few writers.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingCapabilityError(
            f"the digits need scikit-learn: pip install 'hpcdist[study]' ({error}), or omit this task with --tasks"
        ) from error
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return Table("digits", (x[order] / 16).astype(np.float32), y[order].astype(np.int64), len(x) // 5)


def images(path: Path) -> Table:
    """Load the images in the directory ``path``; the file names select the format. Raises DataError."""
    try:
        names = {file.name for file in path.iterdir()}
    except OSError as error:
        raise DataError(f"--data {path}: {error.strerror}; {EXPECTED}") from error
    for image in (f"train-{IMAGES}", f"train-{IMAGES}.gz"):
        if image in names:
            return _mnist(path, names)
    if "data_batch_1.bin" in names:
        batches = [path / f"data_batch_{number}.bin" for number in range(1, 6)]
        return _cifar("cifar10", batches, path / "test_batch.bin", 1, 10)
    if "train.bin" in names:
        return _cifar("cifar100", [path / "train.bin"], path / "test.bin", 2, 100)
    raise DataError(f"--data {path}: it holds {', '.join(sorted(names)[:8]) or 'nothing'}; {EXPECTED}")


def idx(path: Path, dims: int) -> np.ndarray:
    """Read the bytes of an idx file with ``dims`` dims. Raises DataError."""
    content = _content(path)
    magic, expected = content[:4], bytes([0, 0, 8, dims])
    if magic != expected:
        raise DataError(
            f"{path}: starts with {magic.hex() or 'nothing'}, not {expected.hex()} for {dims} dims of bytes"
        )
    header = 4 + 4 * dims
    if len(content) < header:
        raise DataError(f"{path}: ends within its header; expected {header} bytes of it")
    shape = tuple(int(length) for length in np.frombuffer(content, ">u4", dims, 4))
    if len(content) - header != math.prod(shape) or 0 in shape:
        raise DataError(f"{path}: {len(content) - header} bytes behind its header of {shape}; get the file again")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def records(path: Path, labels: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Read pixels and classes of records with ``labels`` label bytes, of which the last counts. Raises DataError."""
    content, record_bytes = _content(path), labels + PIXELS
    if not content or len(content) % record_bytes:
        raise DataError(f"{path}: {len(content)} bytes; expected a multiple of {record_bytes}; get the file again")
    rows = np.frombuffer(content, np.uint8).reshape(-1, record_bytes)
    y = rows[:, labels - 1].astype(np.int64)
    if y.max() >= classes:
        raise DataError(f"{path}: a label of {y.max()}; expected classes from 0 to {classes - 1}")
    return rows[:, labels:], y


def _mnist(path: Path, names: set[str]) -> Table:
    parts = []
    for subset in ("train", "t10k"):
        pair = [f"{subset}-{kind}" for kind in (IMAGES, LABELS)]
        paths = [path / (name if name in names else f"{name}.gz") for name in pair]
        x, y = idx(paths[0], 3), idx(paths[1], 1)
        if len(x) != len(y):
            raise DataError(f"{path}: {len(x)} {subset} images and {len(y)} labels; the numbers must be equal")
        parts.append((x, y.astype(np.int64)))
    return _joined("mnist", parts)


def _cifar(name: str, batches: list[Path], test: Path, labels: int, classes: int) -> Table:
    return _joined(name, [records(path, labels, classes) for path in (*batches, test)])


def _joined(name: str, parts: list[tuple[np.ndarray, np.ndarray]]) -> Table:
    shapes = {x.shape[1:] for x, _ in parts}
    if len(shapes) > 1:
        raise DataError(f"{name}: images of the shapes {sorted(shapes)}; expected a single shape")
    x, y = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
    if 2 * len(parts[-1][0]) > len(x):
        raise DataError(f"{name}: {len(parts[-1][0])} of {len(x)} images are for validation; expected at most half")
    return Table(name, x, y, len(parts[-1][0]))


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}; {EXPECTED}") from error
