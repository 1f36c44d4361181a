"""Samples by index over arrays of tokens or tables.

Masked samples (Devlin et al. 2018) have exactly `masked_predictions` targets each: 80 % of the targets are replaced by
the mask, 10 % by another token, and 10 % stay. The choice depends only on (seed, epoch, sample), through Philox4x32-10
(Salmon et al., SC'11).
"""

import math
import os
import weakref
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, cast

import numpy as np

from hpcdist.arrays.jit import Primitive, jit
from hpcdist.arrays.rng import WORD, philox_arrays
from hpcdist.errors import StorageError
from hpcdist.models.documents import PackedTokens
from hpcdist.models.stage import IGNORED
from hpcdist.models.transformer import masked_predictions
from hpcdist.reporting.regular import open_regular

Batch: TypeAlias = tuple[np.ndarray, np.ndarray]  # inputs (samples, ...), targets (samples, ...)


class Sliceable(Protocol):
    """Interface of arrays and HDF5 datasets that can be read slice by slice."""

    @property
    def dtype(self) -> np.dtype:
        """Data type of an element."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each dimension."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


def _pread(numba: Any) -> Any:
    kinds = numba.types
    # Addresses and sizes are integers: ssize_t pread(int descriptor, void *buffer, size_t count, off_t offset).
    return kinds.ExternalFunction("pread", kinds.intp(kinds.intc, kinds.uintp, kinds.uintp, kinds.int64))


pread = Primitive(_pread, "pread of the C library")


@jit
def _read_blocks(descriptor: Any, offsets: Any, blocks: Any) -> Any:
    # Row i is at file offset offsets[i]. Return the number of rows before the first failure.
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
    """Return a new array of ``shape`` and ``dtype``. Raises StorageError, which names ``path``, if memory is short."""
    try:
        return np.empty(shape, dtype)
    except (ValueError, MemoryError) as error:
        raise StorageError(f"{path}: rows of the shape {shape[1:]} do not fit into memory: {error}") from error


class FileArray:
    """Lazy array over contiguous elements of a file, read on access. Raises StorageError if the file is too short."""

    def __init__(self, path: Path, dtype: Any, offset: int, shape: tuple[int, ...]) -> None:
        self._path, self.place = path, offset
        self._stored, self.shape = np.dtype(dtype), shape
        self.dtype = self._stored.newbyteorder("=")
        self._row_bytes = math.prod(shape[1:]) * self.dtype.itemsize
        try:
            self._descriptor = open_regular(path)
        except OSError as error:
            raise StorageError(f"the data file {path} cannot be read: {error.strerror}") from error
        weakref.finalize(self, os.close, self._descriptor)
        self._check_size()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any, /) -> Any:
        """Return one element, or the elements of an ascending slice, as a new array."""
        if not isinstance(index, slice):
            return self.gather(np.array([range(len(self))[index]]), 1)[0, 0]
        start, stop, step = index.indices(len(self))
        return self.gather(np.array([start]), max(0, stop - start))[0, ::step]

    def files(self) -> list[tuple[Path, os.stat_result]]:
        return [(self._path.resolve(), os.fstat(self._descriptor))]

    def gather(self, starts: np.ndarray, length: int) -> np.ndarray:
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
                f"{self._path} has {size:,} bytes, but its data ends at byte {needed:,}: it was truncated, or is still "
                "being written; provide the whole file"
            )


class ArraySlice:
    """Lazy view of elements ``start`` to ``stop - 1`` of the array ``whole``. Slices are read on access."""

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
        return gather(self._whole, self._start + starts, length)


def slice_of(whole: Sliceable, start: int, stop: int) -> Sliceable:
    """Return a view of elements ``start`` to ``stop - 1`` of ``whole``. Data in files is read on access."""
    return whole[start:stop] if isinstance(whole, np.ndarray) else ArraySlice(whole, start, stop)


def gather(whole: Sliceable, starts: np.ndarray, length: int) -> np.ndarray:
    """Return an array whose row i holds the ``length`` elements of ``whole`` from offset ``starts[i]`` on."""
    if isinstance(whole, np.ndarray):
        rows: np.ndarray = whole[starts[:, None] + np.arange(length)]
    else:
        rows = cast(Any, whole).gather(starts, length)
    return rows


class Samples(Protocol):
    """Interface of ``count`` samples. Sample boundaries in the text can be shifted by 0 to ``shifts - 1`` tokens."""

    count: int
    shifts: int

    def take(self, indices: np.ndarray, shift: int) -> Batch:
        """Return (inputs, targets) of the samples ``indices``, with sample boundaries shifted by ``shift`` tokens."""
        ...


class FilledSamples(Samples, Protocol):
    """Interface of samples that may end with padding."""

    def filled(self, indices: np.ndarray) -> np.ndarray:
        """Return an array with the number of tokens before the padding in each of the samples ``indices``."""
        ...

    def targets(self, indices: np.ndarray) -> int:
        """Return the total number of targets in the samples ``indices``."""
        ...


class TokenWindows:
    """Samples that are adjacent windows of ``context`` tokens. The target of each token is the next token."""

    # ``shifting``: window boundaries vary between epochs, by at most ``context - 1`` tokens.
    def __init__(self, tokens: Sliceable, context: int, shifting: bool) -> None:
        assert len(tokens) > context
        self._tokens, self._context = tokens, context
        self.count = (len(tokens) - 1) // context
        if shifting and self.count > 1:
            self.count -= 1  # room for the shift
        self.shifts = min(context, len(tokens) - self.count * context) if shifting else 1

    def take(self, indices: np.ndarray, shift: int) -> Batch:
        block = gather(self._tokens, indices * self._context + shift, self._context + 1)
        return np.ascontiguousarray(block[:, :-1]), np.ascontiguousarray(block[:, 1:])


class NextTokenSamples:
    """One sample per token position: the target is the token, the inputs are the ``context`` tokens before it."""

    shifts = 1

    def __init__(self, tokens: Sliceable, context: int) -> None:
        assert len(tokens) > context
        self._tokens, self._context = tokens, context
        self.count = len(tokens) - context

    def take(self, indices: np.ndarray, shift: int) -> Batch:
        block = gather(self._tokens, indices, self._context + 1)
        return np.ascontiguousarray(block[:, :-1]), np.ascontiguousarray(block[:, -1])


class TableRows:
    """Samples from table rows ``start`` to ``stop - 1``. Inputs are rows of ``x``. Targets are classes in ``y``."""

    shifts = 1

    def __init__(self, x: Sliceable, y: Sliceable, start: int, stop: int, *, shaped: bool = False) -> None:
        assert start < stop <= len(x) == len(y)
        self._shaped = shaped  # rows keep their dimensions; otherwise they are flattened
        self._x, self._y, self._start = x, y, start
        self.count = stop - start

    def take(self, indices: np.ndarray, shift: int) -> Batch:
        rows = self._start + indices
        x, y = gather(self._x, rows, 1)[:, 0], gather(self._y, rows, 1)[:, 0]
        return x if self._shaped else x.reshape(len(rows), math.prod(x.shape[1:])), y


MASKED_SHARE: Final = 0.8  # fraction of the targets that are replaced by the mask
OTHER_SHARE: Final = 0.1  # fraction that are replaced by another token
VALIDATION_EPOCH: Final = 0xFFFFFFFF  # epoch of the validation masks, with seed 0; no run reaches it
COUNTER_WORDS: Final = 4  # random words per counter of Philox4x32
_MASKING_STREAM: Final = 0x6D61736B  # separates these words from dropout with the same seed


class MaskedSamples:
    """Samples for masked language modelling, made from the samples ``windows``. ``mask``: token at masked positions."""

    # Targets are the original tokens at masked positions, and `IGNORED` elsewhere. ``vocabulary``: number of tokens.
    def __init__(
        self, windows: Samples, mask: int, vocabulary: int, seed: int = 0, epoch: int = VALIDATION_EPOCH
    ) -> None:
        assert 0 <= mask < vocabulary and vocabulary > 1
        self._windows, self._mask, self._vocabulary = windows, mask, vocabulary
        self._seed, self._epoch = seed, epoch
        self.count, self.shifts = windows.count, windows.shifts

    def in_epoch(self, seed: int, epoch: int) -> "MaskedSamples":
        """Return a copy of these samples whose masked tokens are drawn from ``seed`` and ``epoch``."""
        return MaskedSamples(self._windows, self._mask, self._vocabulary, seed, epoch)

    def take(self, indices: np.ndarray, shift: int) -> Batch:
        unmasked, targets = self._windows.take(indices, shift)
        if not isinstance(unmasked, PackedTokens):
            return self._hidden(unmasked, indices)
        tokens, positions, filled = unmasked.arrays
        inputs = tokens.astype(self._input_dtype(tokens))
        for row, size in enumerate(filled.tolist()):
            one = slice(row, row + 1)
            inputs[one, :size], targets[one, :size] = self._hidden(tokens[one, :size], indices[one])
        return PackedTokens.of(inputs, positions, filled), targets  # type: ignore[return-value]

    def filled(self, indices: np.ndarray) -> np.ndarray:
        return cast(FilledSamples, self._windows).filled(indices)

    def targets(self, indices: np.ndarray) -> int:
        filled: list[int] = self.filled(indices).tolist()
        return sum(map(masked_predictions, filled))

    def _input_dtype(self, tokens: np.ndarray) -> np.dtype:
        return np.result_type(tokens.dtype, np.min_scalar_type(self._vocabulary - 1))

    def _hidden(self, tokens: np.ndarray, indices: np.ndarray) -> Batch:
        count, context = tokens.shape
        chosen = masked_predictions(context)
        words = self._words(indices, context + 2 * chosen)
        # The positions of the smallest words are a random choice; the position in the low bits makes words distinct.
        order = words[:, :context] << np.uint64(32) | np.arange(context, dtype=np.uint64)
        positions = np.partition(order, chosen - 1, axis=1)[:, :chosen] & np.uint64(WORD)
        positions = np.sort(positions, axis=1).astype(np.int64)
        fates, draws = words[:, context : context + chosen], words[:, context + chosen :]
        others = (draws * np.uint64(self._vocabulary - 1) >> np.uint64(32)).astype(np.int64)
        others += others >= self._mask  # any token but the mask
        true_tokens = np.take_along_axis(tokens, positions, axis=1).astype(np.int64)
        masked, other = fates < round(MASKED_SHARE * 2**32), fates < round((MASKED_SHARE + OTHER_SHARE) * 2**32)
        read = np.where(masked, self._mask, np.where(other, others, true_tokens))
        inputs = tokens.astype(self._input_dtype(tokens))
        np.put_along_axis(inputs, positions, read.astype(inputs.dtype), axis=1)
        targets = np.full((count, context), IGNORED, np.int64)
        np.put_along_axis(targets, positions, true_tokens, axis=1)
        return inputs, targets

    def _words(self, indices: np.ndarray, count: int) -> np.ndarray:
        sample = indices.astype(np.uint64)[:, None]
        counter = np.arange(-(-count // COUNTER_WORDS), dtype=np.uint64)[None, :]
        counter = counter + np.zeros_like(sample)
        key = self._seed & WORD ^ _MASKING_STREAM, self._seed >> 32 & WORD
        words = philox_arrays((counter, sample & np.uint64(WORD), sample >> np.uint64(32), self._epoch & WORD), key)
        by_sample: np.ndarray = np.stack(np.broadcast_arrays(*words), axis=2).reshape(
            len(indices), COUNTER_WORDS * counter.shape[1]
        )
        return by_sample[:, :count]
