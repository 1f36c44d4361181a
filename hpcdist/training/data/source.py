"""Data sources: the ``[data]`` section as training and validation samples, verified to be the same on all ranks.

A resume rejects data with another fingerprint or digest.
"""

import hashlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import DataError, HpcdistError
from hpcdist.models.config import FOREIGN, TRANSFORMERS, ModelConfig
from hpcdist.models.counts import DocumentPairs
from hpcdist.models.documents import PackedTokens
from hpcdist.models.stage import IGNORED, check_tokens
from hpcdist.training.data import files
from hpcdist.training.data.digests import digest
from hpcdist.training.data.mixture import MixedSamples
from hpcdist.training.data.packed import document_ends, split_documents
from hpcdist.training.data.sampler import in_order
from hpcdist.training.data.samples import (
    Batch,
    MaskedSamples,
    NextTokenSamples,
    Samples,
    Sliceable,
    TableRows,
    TokenWindows,
    slice_of,
)
from hpcdist.training.data.token_files import TokenShards, open_shards
from hpcdist.training.recipe.config import DataConfig

if TYPE_CHECKING:
    from hpcdist.training.recipe.recipe import Recipe

PROBES, PROBE_ELEMENTS = 64, 1024  # number and size of the probes in a fingerprint
MODEL_INPUTS = {"context", "features", "classes", "height", "width", "channels"}  # arguments of `models.build`
LARGEST_INPUT = 1 << 40  # products of three inputs still fit NumPy's numbers


@dataclass(frozen=True)
class Source:
    """Training and validation samples of a run, with a description, hashes and sizes of the data."""

    description: str
    training: Samples
    validation: Samples | None
    tokens: Sliceable | None  # training text, if every token of it is predicted
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
    result = digest(columns, source.description, comm, kept_only=kept_only)
    _agree(config, comm.allgather_object(result.value))
    for column, largest in zip(columns, result.largest, strict=False):
        if model.kind in TRANSFORMERS and largest >= model.vocabulary:
            files_of = [str(path) for path, _ in cast(Any, column).files() or []] if hasattr(column, "files") else []
            raise DataError(
                f"{', '.join(files_of[:3]) or source.description}: the token {largest:,} is not in the vocabulary of "
                f"the model; set model.vocabulary = {model.vocabulary} to at least {largest + 1}, or use tokens of the "
                "model's tokenizer"
            )
    return replace(source, digest=result.value)


def _agree(config: DataConfig, verdicts: list[str | HpcdistError]) -> None:
    for other in verdicts:
        if isinstance(other, HpcdistError):
            raise other
    different = [rank for rank, other in enumerate(verdicts) if other != verdicts[0]]
    if different:
        where = f"data.path = {', '.join(config.paths)}" if config.paths else "the Python standard library"
        raise DataError(
            f"rank {different[0]} and {len(different) - 1} other ranks see other data than rank 0 in {where}; set "
            "data.path to a file that is the same on all nodes"
        )


def _open_files(config: DataConfig, model: ModelConfig) -> tuple[Source, tuple[Sliceable, ...]]:
    config.check_exists()
    if config.source:
        return _mixture(config, model)
    path = Path(config.staged or config.path)
    shards = open_shards(str(path), config.dtype) if config.path else None
    if shards is not None:
        columns = (shards.tokens,) if shards.trained is None else (shards.tokens, shards.trained)
        return _sharded_source(shards, config, model), columns
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
    description = _counted(description, tokens)
    if config.packed:
        ends = document_ends(tokens, ends, config, f"{path}")
        return _packed_source(tokens, ends, description, config, model), (tokens,)
    return _token_source(tokens, description, config, model), (tokens,)


def _counted(description: str, tokens: Sliceable) -> str:
    unit = "bytes" if tokens.dtype == np.uint8 else f"tokens ({tokens.dtype})"
    return f"{description}, {len(tokens):,} {unit}"


def _mixture(config: DataConfig, model: ModelConfig) -> tuple[Source, tuple[Sliceable, ...]]:
    opened = [_open_files(replace(config, source=(), path=one.path, dtype=one.dtype), model) for one in config.source]
    sources, weights = [source for source, _ in opened], [one.weight for one in config.source]
    shares = [weight / sum(weights) for weight in weights]
    for source in sources:
        if source.inputs != sources[0].inputs:
            raise DataError(
                f"data.source: {source.description} has the model sizes {source.inputs}, but {sources[0].description} "
                f"has {sources[0].inputs}; mix only sources of equal samples"
            )
    held_out = [source.validation for source in sources if source.validation is not None]
    names = "; ".join(f"{share:.1%} {source.description}" for share, source in zip(shares, sources, strict=True))
    state = hashlib.blake2b("".join(source.fingerprint for source in sources).encode(), digest_size=16)
    # Sums over the sources, weighted by their shares; None if the samples are not packed.
    mean = partial(_weighted, shares)
    pairs = [source.documents for source in sources if source.documents is not None]
    mixed = Source(
        f"mixture of {len(sources)} sources: {names}",
        MixedSamples([source.training for source in sources], weights),
        MixedSamples(held_out, [1.0] * len(held_out)) if held_out else None,
        None,
        sources[0].inputs,
        state.hexdigest(),
        padding=mean([source.padding for source in sources]),
        targets=mean([source.targets for source in sources]),
        documents=DocumentPairs(*(mean(list(column)) or 0.0 for column in zip(*pairs, strict=True))) if pairs else None,
    )
    return mixed, tuple(column for _, columns in opened for column in columns)


def _weighted(shares: Sequence[float], values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(map(operator.mul, shares, numbers)) if len(numbers) == len(shares) else None


def _sharded_source(shards: TokenShards, config: DataConfig, model: ModelConfig) -> Source:
    tokens, description = shards.tokens, _counted(shards.description, shards.tokens)
    if model.kind in TRANSFORMERS and shards.vocabulary > model.vocabulary:
        raise DataError(
            f"{shards.description}: its tokenizer has {shards.vocabulary:,} tokens, but model.vocabulary = "
            f"{model.vocabulary:,}; set model.vocabulary to at least {shards.vocabulary}"
        )
    if shards.trained is not None and (not config.packed or model.kind == "encoder"):
        raise DataError(
            f"{shards.description}: only the answers of its chats are trained, which needs whole documents and a "
            "model that predicts the next token; set data.packed = true and model.kind = 'gpt'"
        )
    if config.packed:
        ends = document_ends(tokens, shards.document_ends(), config, shards.description)
        return _packed_source(tokens, ends, description, config, model, shards.trained)
    return _token_source(tokens, description, config, model, shards.border)


def _token_source(
    tokens: Sliceable,
    description: str,
    config: DataConfig,
    model: ModelConfig,
    border: Callable[[int], int] = lambda position: position,
) -> Source:
    # ``border``: function that returns the last end of a document up to a position.
    context = config.context
    needs = (
        f"data.context = {context} needs {context + 1} tokens a sample; give more data, or set a smaller data.context"
    )
    stop = _training_part(len(tokens), config.validation_fraction, context + 1, description, needs)
    stop = border(stop)
    if stop <= context:
        raise DataError(
            f"{description}: the last documents, with data.validation_fraction = {config.validation_fraction} of the "
            f"tokens, leave {stop:,} tokens for training; give more documents, or set data.validation_fraction = 0"
        )
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
    tokens: Sliceable,
    ends: np.ndarray,
    description: str,
    config: DataConfig,
    model: ModelConfig,
    trained: Sliceable | None = None,
) -> Source:
    split = split_documents(tokens, ends, config, model, description, trained)
    training, columns = split.training, [tokens] if trained is None else [tokens, trained]
    state = hashlib.blake2b(_fingerprint(*columns).encode() + ends.tobytes(), digest_size=16)
    return Source(
        f"{description}; {split.described}",
        training,
        split.validation,
        slice_of(tokens, 0, split.stop) if model.kind != "encoder" and trained is None else None,
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
