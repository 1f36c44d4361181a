"""Data sources: the ``[data]`` section as training and validation samples, verified to be the same on all ranks.

A resume rejects data with another fingerprint or digest.
"""

import hashlib
import json
import math
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import DataError, HpcdistError
from hpcdist.models.config import FOREIGN, TRANSFORMERS, ModelConfig
from hpcdist.models.counts import DocumentPairs
from hpcdist.models.documents import PackedTokens
from hpcdist.models.stage import IGNORED, check_tokens
from hpcdist.reporting import user_cache
from hpcdist.training.data import files
from hpcdist.training.data.files import Hdf5Dataset
from hpcdist.training.data.packed import document_ends, split_documents
from hpcdist.training.data.sampler import in_order
from hpcdist.training.data.samples import (
    Batch,
    FileArray,
    MaskedSamples,
    NextTokenSamples,
    Samples,
    Sliceable,
    TableRows,
    TokenWindows,
    slice_of,
)
from hpcdist.training.recipe.config import DataConfig

if TYPE_CHECKING:
    from hpcdist.training.recipe.recipe import Recipe

KIND: Final = "data_digests"
BLOCK_BYTES: Final = 1 << 28  # block that one rank reads between two messages; part of the digest's definition
READ_BYTES: Final = 1 << 22  # bytes read at a time
ANNOUNCED_ROUNDS: Final = 16  # the reading of more blocks per rank is announced
SETTLED_NS: Final = 2_000_000_000  # a file changed more recently could change again without a new timestamp
_memory_cache: dict[str, str] = {}  # digests by file state, for users without a writable cache directory


def digest(columns: Sequence[Sliceable], what: str, comm: Communicator, *, kept_only: bool = False) -> str:
    """Return a hexadecimal hash of all elements of the arrays ``columns``. Collective. Raises StorageError.

    ``what``: name of the data for messages. ``kept_only``: return a cached hash, or "" without a cached hash.
    """
    # Ranks with the same files share the work.
    began_ns = time.time_ns()
    key, newest_ns = _file_state(columns)
    states = comm.allgather_object((key, _cached(key)))
    members = [rank for rank, (other, _) in enumerate(states) if other == key]
    result = next((value for other, value in states if other == key and value), "")
    sizes = Counter(other for other, _ in states)
    waiting = set(sizes) - {other for other, value in states if value}
    if kept_only and waiting:
        return ""
    blocks = sum(_blocks(column) for column in columns)
    rounds = max((-(-blocks // sizes[other]) for other in waiting), default=0)
    if rounds > ANNOUNCED_ROUNDS and comm.rank == 0:
        _announce(what, columns)
    parts: list[bytes] = []
    for number in range(rounds):
        index = number * len(members) + members.index(comm.rank)
        part: bytes | HpcdistError = b""
        if not result and index < blocks:
            try:
                part = _block(*_block_place(columns, index))
            except HpcdistError as error:
                part = error
        gathered = comm.allgather_object(part)
        for other_part in gathered:
            if isinstance(other_part, HpcdistError):
                raise other_part
        parts += [gathered[rank] for rank in members]  # in the order of the blocks; empty parts come last
    if result:
        return result
    types = json.dumps([[str(column.dtype), list(column.shape)] for column in columns])
    result = xxhash.xxh3_128_hexdigest(types.encode() + b"".join(parts))
    if newest_ns is not None and newest_ns < began_ns - SETTLED_NS and _file_state(columns)[0] == key:
        _memory_cache[key] = result
        if comm.rank == members[0]:
            _store_digest(key, result, what if rounds > ANNOUNCED_ROUNDS else "")
    return result


def _rows(column: Sliceable) -> int:
    return max(1, BLOCK_BYTES // _row_bytes(column))


def _blocks(column: Sliceable) -> int:
    return -(-len(column) // _rows(column))


def _block_place(columns: Sequence[Sliceable], number: int) -> tuple[Sliceable, int]:
    for column in columns:
        if number < _blocks(column):
            return column, number * _rows(column)
        number -= _blocks(column)
    raise IndexError(
        f"the training data has {sum(map(_blocks, columns))} blocks, but the caller asks for block "
        f"{sum(map(_blocks, columns)) + number}; ask for a smaller number"
    )


def _row_bytes(column: Sliceable) -> int:
    return max(1, column.dtype.itemsize * math.prod(column.shape[1:]))


def _block(column: Sliceable, start: int) -> bytes:
    state, stop = xxhash.xxh3_128(), min(start + _rows(column), len(column))
    step = max(1, READ_BYTES // _row_bytes(column))
    for first in range(start, stop, step):
        state.update(np.ascontiguousarray(column[first : min(first + step, stop)]).view(np.uint8).data)
    return state.digest()


def _file_state(columns: Sequence[Sliceable]) -> tuple[str, int | None]:
    state: list[Any] = []
    newest_ns = 0
    for column in columns:
        if not isinstance(column, FileArray | Hdf5Dataset) or (files := column.files()) is None:
            return f"of {socket.gethostname()}", None
        state.append([str(column.dtype), list(column.shape), column.place])
        for path, status in files:
            state.append([str(path), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns])
            newest_ns = max(newest_ns, status.st_mtime_ns, status.st_ctime_ns)
    return user_cache.digest({"state": state}), newest_ns


def _cached(key: str) -> str:
    if key in _memory_cache:
        return _memory_cache[key]
    try:
        content = json.loads(user_cache.read(_cache_path(key)))
        value = content["digest"] if content["key"] == key else ""
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""


def _store_digest(key: str, value: str, what: str) -> None:
    try:
        user_cache.write(_cache_path(key), {"key": key, "digest": value})
    except OSError as error:
        if what:
            reason = f"{error.strerror or error}; set XDG_CACHE_HOME to a directory"
            print(f"hpcdist: each start reads all of {what}: its digest cannot be cached ({reason})", file=sys.stderr)


def _cache_path(key: str) -> Path:
    return user_cache.directory(KIND) / f"{key}.json"


def _announce(what: str, columns: Sequence[Sliceable]) -> None:
    size = sum(_row_bytes(column) * len(column) for column in columns)
    print(
        f"hpcdist: all {size / 1e9:,.0f} GB of {what} are read once to verify the data in a resume; "
        "data.digest = 'probes' reads only samples of it",
        file=sys.stderr,
        flush=True,
    )


PROBES, PROBE_ELEMENTS = 64, 1024  # number and size of the probes in a fingerprint
MODEL_INPUTS = {"context", "features", "classes", "height", "width", "channels"}  # arguments of `models.build`
LARGEST_INPUT = 1 << 40  # products of three inputs still fit NumPy's numbers


@dataclass(frozen=True)
class Source:
    """Training and validation samples of a run, with a description, hashes and sizes of the data."""

    description: str
    training: Samples
    validation: Samples | None
    tokens: Sliceable | None  # training text for next-token prediction
    inputs: dict[str, int]  # model sizes set by the data, such as the number of classes
    fingerprint: str  # hash of a few elements
    digest: str = ""  # hash of all data, or ""
    padding: float | None = None  # packed training samples: fraction of padding
    targets: float | None = None  # packed training samples: mean number of targets
    documents: DocumentPairs | None = None  # packed training samples: pairs of attention

    def matches(self, scalars: Mapping[str, Any]) -> bool:
        """Return True if a checkpoint belongs to a training on this data. ``scalars``: scalars of the checkpoint."""
        stored = scalars.get("data_digest")
        return scalars["data"] == self.fingerprint and (not stored or not self.digest or stored == self.digest)

    def validation_batches(self, recipe: "Recipe", parts: int, part: int | None) -> Iterator[Batch]:
        """Yield the validation micro-batches of shard number ``part`` of ``parts``.

        Every shard has the same number of micro-batches, of which the last may be empty. If ``part`` is None, all
        micro-batches are empty.
        """
        if self.validation is None:
            return
        longest = -(-recipe.run.global_batch // (parts * recipe.parallel.microbatches))
        for batch in in_order(self.validation, recipe.run.validation_samples, parts, part or 0, longest):
            yield batch if part is not None else (batch[0][:0], batch[1][:0])

    def targets_in(self, targets: Array, per_sample: float) -> float:
        """Return the number of targets in the mean loss of a batch.

        ``targets``: target array of the batch. ``per_sample``: number of targets in a sample without padding. In packed
        samples, `IGNORED` targets do not count.
        """
        if self.padding is None:
            return len(targets) * per_sample
        return int((targets != IGNORED).sum())

    def place(self, batch: Batch, recipe: "Recipe") -> Batch:
        """Return a copy of ``batch`` on the device of ``recipe``. Local.

        Raises DataError for tokens outside the vocabulary.
        """
        on, vocabulary = recipe.run.device, recipe.model.vocabulary
        if isinstance(batch[0], PackedTokens):
            tokens, *rest = batch[0].arrays
            tokens, targets = self.place((tokens, batch[1]), recipe)
            return PackedTokens.of(tokens, *rest), targets  # type: ignore[return-value]
        if on == "gpu":  # check here, in host memory: the model would synchronise the GPU at every use
            if recipe.model.kind in FOREIGN:  # a user's model checks its inputs itself
                return backend.place(batch[0], on), backend.place(batch[1], on)
            if recipe.model.kind in TRANSFORMERS:
                check_tokens(batch[0], vocabulary, "token")
            ignored = recipe.model.kind == "encoder" or recipe.data.packed
            check_tokens(batch[1], self.inputs.get("classes", vocabulary), "target", ignored=ignored)
        return backend.place(batch[0], on), backend.place(batch[1], on)


def usable_inputs(inputs: object) -> dict[str, int]:
    """Return ``inputs`` if it is a valid dict {name of a model size: positive integer}, else {}. Local.

    Model sizes that the data determine, such as the number of classes, are stored in checkpoints.
    """
    if not isinstance(inputs, dict) or not set(inputs) <= MODEL_INPUTS:
        return {}
    return inputs if all(type(size) is int and 0 < size < LARGEST_INPUT for size in inputs.values()) else {}


def open_source(
    config: DataConfig, model: ModelConfig, comm: Communicator, *, digests: bool = True, kept_only: bool = False
) -> Source:
    """Open the training data that recipe section ``config`` names, and return a `Source` for ``model``. Collective.

    All ranks of ``comm`` raise DataError if data is missing, unsuitable for ``model``, or different between ranks.
    """
    # Ranks compare hashes of some elements and, with ``digests``, of all data. ``kept_only``: use only a cached hash of
    # all data.
    verdict: str | HpcdistError
    try:
        source, columns = _open_files(config, model)
        verdict = source.fingerprint
    except HpcdistError as error:
        verdict = error
    _agree(config, comm.allgather_object(verdict))
    if not digests or config.digest == "probes":
        return source
    source = replace(source, digest=digest(columns, source.description, comm, kept_only=kept_only))
    _agree(config, comm.allgather_object(source.digest))
    return source


def _agree(config: DataConfig, verdicts: list[str | HpcdistError]) -> None:
    for other in verdicts:
        if isinstance(other, HpcdistError):
            raise other
    different = [rank for rank, other in enumerate(verdicts) if other != verdicts[0]]
    if different:
        where = f"data.path = {config.path}" if config.path else "the Python standard library"
        raise DataError(
            f"rank {different[0]} and {len(different) - 1} other ranks see other data than rank 0 in {where}; set "
            "data.path to a file that is the same on all nodes"
        )


def _open_files(config: DataConfig, model: ModelConfig) -> tuple[Source, tuple[Sliceable, ...]]:
    path = Path(config.staged or config.path)
    config.check_exists()
    kind = files.kind_of(path) if config.path else "library"
    if model.kind == "convnet" and kind != "hdf5":
        raise DataError(
            f"data.path = {config.path!r}: a convnet takes pictures; set data.path to an HDF5 file with datasets x "
            "(rows, height, width) or (rows, height, width, channels) and y (rows,)"
        )
    if kind == "hdf5" and model.kind == "import" and not files.holds_tokens(path):
        return _table_source(path, config.validation_fraction, pictures=False, shaped=True)
    if kind == "hdf5" and model.kind not in (*TRANSFORMERS, "import"):
        return _table_source(path, config.validation_fraction, pictures=model.kind == "convnet")
    tokens: Sliceable
    ends = None  # of documents, if files define them
    if kind in ("hdf5", "npy"):
        tokens = files.hdf5_tokens(path) if kind == "hdf5" else files.npy_tokens(path)
        description = f"{path}"
    elif kind == "library":
        tokens, ends, description = files.text_of_standard_library()
    elif kind == "directory":
        tokens, ends, description = files.text_of_directory(path)
    else:
        tokens, description = files.bytes_of_file(path), f"{path}"
    unit = "bytes" if tokens.dtype == np.uint8 else f"tokens ({tokens.dtype})"
    description = f"{description}, {len(tokens):,} {unit}"
    if config.packed:
        ends = document_ends(tokens, ends, config, f"{path}")
        return _packed_source(tokens, ends, description, config, model), (tokens,)
    return _token_source(tokens, description, config, model), (tokens,)


def _token_source(tokens: Sliceable, description: str, config: DataConfig, model: ModelConfig) -> Source:
    context = config.context
    needs = (
        f"data.context = {context} needs {context + 1} tokens a sample; give more data, or set a smaller data.context"
    )
    stop = _training_part(len(tokens), config.validation_fraction, context + 1, description, needs)
    training = slice_of(tokens, 0, stop)
    rest = slice_of(tokens, stop, len(tokens)) if stop < len(tokens) else None
    fingerprint = _fingerprint(tokens)
    if model.kind in (*TRANSFORMERS, "import"):
        validation: Samples | None = TokenWindows(rest, context, shifting=False) if rest is not None else None
        windows = TokenWindows(training, context, shifting=True)
        inputs = {"context": context}
        if model.kind != "encoder":
            return Source(description, windows, validation, training, inputs, fingerprint)
        masks = model.mask, model.vocabulary
        validation = MaskedSamples(validation, *masks) if validation is not None else None
        return Source(description, MaskedSamples(windows, *masks), validation, None, inputs, fingerprint)
    if tokens.dtype != np.uint8:
        raise DataError(
            f"{description}: an mlp needs a file of bytes, or an HDF5 file with datasets x and y; change data.path, or "
            "train a gpt on this data"
        )
    validation_samples = NextTokenSamples(rest, context) if rest is not None else None
    inputs = {"features": context, "classes": 256}
    return Source(description, NextTokenSamples(training, context), validation_samples, training, inputs, fingerprint)


def _packed_source(
    tokens: Sliceable, ends: np.ndarray, description: str, config: DataConfig, model: ModelConfig
) -> Source:
    split = split_documents(tokens, ends, config, model, description)
    training, state = split.training, hashlib.blake2b(_fingerprint(tokens).encode() + ends.tobytes(), digest_size=16)
    return Source(
        f"{description}; {split.described}",
        training,
        split.validation,
        slice_of(tokens, 0, split.stop) if model.kind != "encoder" else None,
        {"context": config.context},
        state.hexdigest(),
        padding=split.padding,
        documents=split.pairs,
        targets=training.targets(np.arange(training.count)) / training.count,
    )


def _table_source(
    path: Path, fraction: float, *, pictures: bool, shaped: bool = False
) -> tuple[Source, tuple[Sliceable, ...]]:
    x, y, classes = files.hdf5_table(path)
    features = math.prod(x.shape[1:])
    inputs = {"features": features, "classes": classes}
    description = f"{path}, {len(x):,} rows of {features} features in {classes} classes"
    if pictures or (shaped and len(x.shape) in (3, 4)):
        if len(x.shape) not in (3, 4):
            raise DataError(
                f"data.path = {path}: x has the shape {x.shape}; a convnet takes pictures (rows, height, width) or "
                "(rows, height, width, channels); store the data in such a shape, or train an mlp"
            )
        height, width, channels = (*x.shape[1:], 1)[:3]
        inputs = {"height": height, "width": width, "channels": channels, "classes": classes}
        description = f"{path}, {len(x):,} pictures of {height} x {width} x {channels} in {classes} classes"
    stop = _training_part(len(x), fraction, 1, description, "a sample is a row; give more data")
    validation = TableRows(x, y, stop, len(x), shaped=shaped) if stop < len(x) else None
    rows = TableRows(x, y, 0, stop, shaped=shaped)
    return Source(description, rows, validation, None, inputs, _fingerprint(x, y)), (x, y)


def _training_part(total: int, fraction: float, least: int, what: str, cure: str) -> int:
    validation = max(least, round(total * fraction)) if fraction > 0 else 0
    if total - validation < least:
        purpose = "one sample to train and one to validate" if validation else "one sample"
        raise DataError(f"{what}: the data is too short for {purpose}: {cure}")
    return total - validation


def _fingerprint(*columns: Sliceable) -> str:
    state = hashlib.blake2b(digest_size=16)
    for column in columns:
        state.update(f"{column.dtype} {column.shape}".encode())
        rows = max(1, PROBE_ELEMENTS // max(1, math.prod(column.shape[1:])))
        for probe in range(PROBES):
            start = probe * max(0, len(column) - rows) // (PROBES - 1)
            state.update(np.ascontiguousarray(column[start : start + rows]).tobytes())
    return state.hexdigest()


class ScriptSamples:
    """Placeholder for the samples of a run whose script provides the batches."""

    count, shifts = 1, 1

    def take(self, indices: np.ndarray, shift: int) -> Batch:
        raise AssertionError("the batches of this run come from its script, not from a data source")


def script_source() -> Source:
    """Return a placeholder data source for a run whose script provides the training and validation batches."""
    return Source("of the script", ScriptSamples(), None, None, {}, "of the script")
