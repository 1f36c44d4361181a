"""Numbered samples over arrays of tokens or tables, and their masked form for encoders.

`FileArray` reads elements from a file without a copy of it; `TokenWindows`, `NextTokenSamples` and `TableRows` cut
samples from an array of any kind.

`MaskedSamples` hides tokens for an encoder (Devlin et al. 2018): of each sample exactly `predictions` tokens are
chosen; four in five become the mask, one in ten another token, one in ten stays; all are targets. The choice is a
function of (seed, epoch, sample) alone: the same under every cut of a batch, other places in every epoch. Words come
from Philox4x32-10 (Salmon et al., SC'11).
"""

import math
import os
import weakref
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, cast

import numpy as np

from hpcdist.arrays.jit import Primitive, jit
from hpcdist.arrays.rng import philox_arrays
from hpcdist.errors import StorageError
from hpcdist.models.documents import PackedTokens
from hpcdist.models.stage import IGNORED
from hpcdist.models.transformer import masked_predictions
from hpcdist.reporting.regular import open_regular

Batch: TypeAlias = tuple[np.ndarray, np.ndarray]  # inputs (samples, ...), targets (samples, ...)


class Sliceable(Protocol):
    """Protocol of an array and an HDF5 dataset: elements are read slice by slice."""

    @property
    def dtype(self) -> np.dtype:
        """Type of an element."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Length in every dimension."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


def _pread(numba: Any) -> Any:
    kinds = numba.types
    # Addresses and sizes as integers: ssize_t pread(int descriptor, void *buffer, size_t count, off_t offset).
    return kinds.ExternalFunction("pread", kinds.intp(kinds.intc, kinds.uintp, kinds.uintp, kinds.int64))


pread = Primitive(_pread, "pread of the C library")


@jit
def _read_blocks(descriptor: Any, offsets: Any, blocks: Any) -> Any:
    """Fill the rows of ``blocks`` (n, bytes) from ``offsets`` on; return the first that could not be read, else n."""
    address, size = blocks.ctypes.data, blocks.shape[1]
    for i in range(len(offsets)):
        done = 0
        while done < size:
            count = pread(descriptor, address + i * size + done, size - done, offsets[i] + done)
            if count <= 0:
                return i
            done += count
    return len(offsets)


_read_blocks.sample(lambda: (0, np.empty(0, np.int64), np.empty((0, 1), np.uint8)))


def allocated(shape: tuple[int, ...], dtype: np.dtype, path: Path) -> np.ndarray:
    """Return a new array for rows of the file at ``path``. Raises StorageError where they do not fit into memory."""
    try:
        return np.empty(shape, dtype)
    except (ValueError, MemoryError) as error:
        raise StorageError(f"{path}: rows of the shape {shape[1:]} do not fit into memory: {error}") from error


class FileArray:
    """Array whose elements lie contiguously in a file, of which each slice is read when it is needed.

    It is read and not mapped: a file that another process truncates, or a disk that fails, raises a StorageError here;
    in a map it would be a SIGBUS. Construction raises StorageError where the file cannot be read or is too short.
    """

    def __init__(self, path: Path, dtype: Any, offset: int, shape: tuple[int, ...]) -> None:
        self._path, self.place = path, offset
        self._stored, self.shape = np.dtype(dtype), shape
        self.dtype = self._stored.newbyteorder("=")
        self._row_bytes = math.prod(shape[1:]) * self.dtype.itemsize
        try:
            self._descriptor = open_regular(path)
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from error
        weakref.finalize(self, os.close, self._descriptor)
        self._check_size()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any, /) -> Any:
        """Return the element, or the elements of a slice that ascends, as a new array."""
        if not isinstance(index, slice):
            return self.gather(np.array([range(len(self))[index]]), 1)[0, 0]
        start, stop, step = index.indices(len(self))
        return self.gather(np.array([start]), max(0, stop - start))[0, ::step]

    def files(self) -> list[tuple[Path, os.stat_result]]:
        """Return the file that holds the elements, which begin at its byte ``place``, as it is now."""
        return [(self._path.resolve(), os.fstat(self._descriptor))]

    def gather(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return (n, length, ...): the elements from each start on. Raises StorageError when the file is cut."""
        rows = allocated((len(starts), length, *self.shape[1:]), self.dtype, self._path)
        if rows.size:
            assert starts.min() >= 0 and starts.max() + length <= len(self)
            blocks = rows.reshape(len(starts), -1).view(np.uint8)
            offsets = self.place + starts.astype(np.int64) * self._row_bytes
            row = 0
            while (row := row + _read_blocks(self._descriptor, offsets[row:], blocks[row:])) < len(starts):
                self._read_again(int(offsets[row]), blocks[row])
                row += 1
            if not self._stored.isnative:
                rows.byteswap(inplace=True)
        return rows

    def _read_again(self, offset: int, row: np.ndarray) -> None:
        """Fill ``row`` by calls that Python repeats where a signal interrupts them. Raises StorageError."""
        done = 0
        while done < row.size:
            try:
                part = os.pread(self._descriptor, row.size - done, offset + done)
            except OSError as error:
                raise StorageError(f"{self._path}: byte {offset + done:,} cannot be read: {error.strerror}") from error
            if not part:
                self._check_size()
                raise StorageError(
                    f"{self._path}: {row.size:,} bytes from byte {offset:,} on cannot be read; try again"
                )
            row[done : done + len(part)] = np.frombuffer(part, np.uint8)
            done += len(part)

    def _check_size(self) -> None:
        size, needed = os.fstat(self._descriptor).st_size, self.place + len(self) * self._row_bytes
        if size < needed:
            raise StorageError(
                f"{self._path} has {size:,} bytes, and its data ends at byte {needed:,}: it was cut, or is still being "
                "written; give back the whole file"
            )


class ArraySlice:
    """Elements ``start`` to ``stop - 1`` of a dataset, of which each slice is read when it is needed."""

    def __init__(self, whole: Sliceable, start: int, stop: int) -> None:
        self._whole, self._start = whole, start
        self.dtype = whole.dtype
        self.shape = (stop - start, *whole.shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice, /) -> Any:
        start, stop, step = index.indices(len(self))
        return self._whole[self._start + start : self._start + stop : step]

    def gather(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return (n, length, ...): the elements from each start on."""
        return gather(self._whole, self._start + starts, length)


def slice_of(whole: Sliceable, start: int, stop: int) -> Sliceable:
    """Return elements ``start`` to ``stop - 1`` of ``whole`` without reading them."""
    return whole[start:stop] if isinstance(whole, np.ndarray) else ArraySlice(whole, start, stop)


def gather(whole: Sliceable, starts: np.ndarray, length: int) -> np.ndarray:
    """Return (n, length, ...) as a new array: the elements of ``whole`` from each start on."""
    if isinstance(whole, np.ndarray):
        rows: np.ndarray = whole[starts[:, None] + np.arange(length)]
    else:
        rows = cast(Any, whole).gather(starts, length)
    return rows


class Samples(Protocol):
    """``count`` samples at each of ``shifts`` offsets."""

    count: int
    shifts: int

    def take(self, indices: np.ndarray, shift: int) -> Batch:
        """Return the samples at ``indices`` (n,) as new arrays: inputs (n, ...) and targets (n, ...)."""
        ...


class FilledSamples(Samples, Protocol):
    """Samples of which only some places are filled; the others are padding."""

    def filled(self, indices: np.ndarray) -> np.ndarray:
        """Return how many places of each sample hold documents, those in front."""
        ...

    def targets(self, indices: np.ndarray) -> int:
        """Return the number of targets of samples."""
        ...


class TokenWindows:
    """Windows of ``context`` tokens side by side; the target of each token is the next one.

    With ``shifting`` all windows can be moved by up to ``context - 1`` tokens, so that epochs do not always cut the
    text at the same places.
    """

    def __init__(self, tokens: Sliceable, context: int, shifting: bool) -> None:
        assert len(tokens) > context
        self._tokens, self._context = tokens, context
        self.count = (len(tokens) - 1) // context
        if shifting and self.count > 1:
            self.count -= 1  # room for the shift
        self.shifts = min(context, len(tokens) - self.count * context) if shifting else 1

    def take(self, indices: np.ndarray, shift: int) -> Batch:
        """Return inputs and targets, both (n, context)."""
        block = gather(self._tokens, indices * self._context + shift, self._context + 1)
        return np.ascontiguousarray(block[:, :-1]), np.ascontiguousarray(block[:, 1:])


class NextTokenSamples:
    """Every place in a text: the input is the ``context`` tokens before it, the target its token."""

    shifts = 1

    def __init__(self, tokens: Sliceable, context: int) -> None:
        assert len(tokens) > context
        self._tokens, self._context = tokens, context
        self.count = len(tokens) - context

    def take(self, indices: np.ndarray, shift: int) -> Batch:
        """Return inputs (n, context) and targets (n,)."""
        block = gather(self._tokens, indices, self._context + 1)
        return np.ascontiguousarray(block[:, :-1]), np.ascontiguousarray(block[:, -1])


class TableRows:
    """Rows ``start`` to ``stop - 1`` of a table ``x`` (rows, ...) and of its classes ``y`` (rows,).

    With ``shaped`` rows keep their shape in ``x``; else they become vectors of features.
    """

    shifts = 1

    def __init__(self, x: Sliceable, y: Sliceable, start: int, stop: int, *, shaped: bool = False) -> None:
        assert start < stop <= len(x) == len(y)
        self._shaped = shaped
        self._x, self._y, self._start = x, y, start
        self.count = stop - start

    def take(self, indices: np.ndarray, shift: int) -> Batch:
        """Return inputs (n, features), or (n, ...), and targets (n,)."""
        rows = self._start + indices
        x, y = gather(self._x, rows, 1)[:, 0], gather(self._y, rows, 1)[:, 0]
        return x if self._shaped else x.reshape(len(rows), math.prod(x.shape[1:])), y


MASKED_SHARE: Final = 0.8  # share of the chosen tokens that become the mask
OTHER_SHARE: Final = 0.1  # share of them that become another token
VALIDATION_EPOCH: Final = 0xFFFFFFFF  # with seed 0, the epoch of the masks of validation: no run gets so far
COUNTER_WORDS: Final = 4  # random words from one counter of Philox4x32
_WORD: Final = 0xFFFFFFFF
_MASKING_STREAM: Final = 0x6D61736B  # tells these words from those of dropout under the same seed


class MaskedSamples:
    """Samples of ``windows`` with tokens hidden as in ``epoch``; targets are the hidden tokens, elsewhere IGNORED.

    ``mask`` stands for a hidden token, of ``vocabulary`` tokens.
    """

    def __init__(
        self, windows: Samples, mask: int, vocabulary: int, seed: int = 0, epoch: int = VALIDATION_EPOCH
    ) -> None:
        assert 0 <= mask < vocabulary and vocabulary > 1
        self._windows, self._mask, self._vocabulary = windows, mask, vocabulary
        self._seed, self._epoch = seed, epoch
        self.count, self.shifts = windows.count, windows.shifts

    def in_epoch(self, seed: int, epoch: int) -> "MaskedSamples":
        """Return the same samples as ``epoch`` of a run with ``seed`` has them."""
        return MaskedSamples(self._windows, self._mask, self._vocabulary, seed, epoch)

    def take(self, indices: np.ndarray, shift: int) -> Batch:
        """Return inputs (n, context), in a type that has room for the mask, and targets (n, context) int64."""
        given, targets = self._windows.take(indices, shift)
        if not isinstance(given, PackedTokens):
            return self._hidden(given, indices)
        tokens, places, filled = given.arrays
        inputs = tokens.astype(self._input_dtype(tokens))
        for row, size in enumerate(filled.tolist()):
            own = slice(row, row + 1)
            inputs[own, :size], targets[own, :size] = self._hidden(tokens[own, :size], indices[own])
        return PackedTokens.of(inputs, places, filled), targets  # type: ignore[return-value]

    def filled(self, indices: np.ndarray) -> np.ndarray:
        """Return how many places of each packed sample hold documents."""
        return cast(FilledSamples, self._windows).filled(indices)

    def targets(self, indices: np.ndarray) -> int:
        """Return the number of targets of packed samples."""
        filled: list[int] = self.filled(indices).tolist()
        return sum(map(masked_predictions, filled))

    def _input_dtype(self, tokens: np.ndarray) -> np.dtype:
        return np.result_type(tokens.dtype, np.min_scalar_type(self._vocabulary - 1))

    def _hidden(self, tokens: np.ndarray, indices: np.ndarray) -> Batch:
        count, context = tokens.shape
        chosen = masked_predictions(context)
        words = self._words(indices, context + 2 * chosen)
        # The places of the smallest random words are a random choice; the place in the low bits makes all different.
        order = words[:, :context] << np.uint64(32) | np.arange(context, dtype=np.uint64)
        places = np.partition(order, chosen - 1, axis=1)[:, :chosen] & np.uint64(_WORD)
        places = np.sort(places, axis=1).astype(np.int64)
        fates, draws = words[:, context : context + chosen], words[:, context + chosen :]
        others = (draws * np.uint64(self._vocabulary - 1) >> np.uint64(32)).astype(np.int64)
        others += others >= self._mask  # any token but the mask
        true_tokens = np.take_along_axis(tokens, places, axis=1).astype(np.int64)
        masked, other = fates < round(MASKED_SHARE * 2**32), fates < round((MASKED_SHARE + OTHER_SHARE) * 2**32)
        read = np.where(masked, self._mask, np.where(other, others, true_tokens))
        inputs = tokens.astype(self._input_dtype(tokens))
        np.put_along_axis(inputs, places, read.astype(inputs.dtype), axis=1)
        targets = np.full((count, context), IGNORED, np.int64)
        np.put_along_axis(targets, places, true_tokens, axis=1)
        return inputs, targets

    def _words(self, indices: np.ndarray, count: int) -> np.ndarray:
        """Return (n, count) random words below 2^32 as uint64, a row for each sample."""
        sample = indices.astype(np.uint64)[:, None]
        place = np.arange(-(-count // COUNTER_WORDS), dtype=np.uint64)[None, :]
        place = place + np.zeros_like(sample)
        key = self._seed & _WORD ^ _MASKING_STREAM, self._seed >> 32 & _WORD
        words = philox_arrays((place, sample & np.uint64(_WORD), sample >> np.uint64(32), self._epoch & _WORD), key)
        by_sample: np.ndarray = np.stack(np.broadcast_arrays(*words), axis=2).reshape(
            len(indices), COUNTER_WORDS * place.shape[1]
        )
        return by_sample[:, :count]
