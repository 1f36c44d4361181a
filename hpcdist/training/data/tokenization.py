"""Tokenization of documents into HDF5 shards, by any number of ranks: `hpcdist data tokenize`.

Each group of input pieces is one shard. Groups depend only on the input files and options, so the shards have the same
bytes for any number of ranks. A shard gets its name when it is complete: after a kill, only missing shards are made.
"""

import importlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import DataError, HpcdistError, MissingCapabilityError, StorageError, UsageError
from hpcdist.reporting import atomic, regular
from hpcdist.training.data import chats
from hpcdist.training.data.documents import EXTRA, FileRange, Reading, Row
from hpcdist.training.data.token_files import INDEX_NAME, INDEX_SCHEMA, INDEX_VERSION, open_directory, read_index

TOKENIZER_NAME: Final = "tokenizer.json"
SHARD_SCHEMA: Final = "hpcdist.token_shard"
SHARD_VERSION: Final = 1
ENDS: Final = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # usual names of the end of a document
COUNTS: Final = ("documents", "tokens", "trained", "empty")  # sums over the shards
BATCH_CHARACTERS: Final = 1 << 20  # passed to the tokenizer at a time


@dataclass(frozen=True)
class Encoder:
    """Tokenizer of documents: the content of a tokenizer.json, and the tokens around each document."""

    content: str
    end: int  # token after each document
    begin: int | None  # token before each document, or None
    vocabulary: int  # largest token + 1
    template: chats.ChatTemplate | None = None
    warning: str = ""  # about the chat template

    @property
    def dtype(self) -> np.dtype:
        """Narrowest unsigned type that holds every token."""
        return np.min_scalar_type(self.vocabulary - 1)

    @property
    def digest(self) -> str:
        """Hash of the tokenizer."""
        return xxhash.xxh3_128_hexdigest(self.content.encode())

    def encode(self, texts: Iterator[str]) -> tuple[dict[str, np.ndarray], int]:
        """Return (datasets of a shard with the documents ``texts``, number of skipped empty texts). Local."""
        parts: list[np.ndarray] = []
        empty = 0
        for batch in _batches((text, text) for text in texts):
            for encoding in self._library.encode_batch_fast(batch, add_special_tokens=False):
                tokens = encoding.ids
                if not tokens:
                    empty += 1
                    continue
                tokens.append(self.end)
                if self.begin is not None:
                    tokens.insert(0, self.begin)
                parts.append(np.fromiter(tokens, self.dtype, len(tokens)))
        return self._datasets(parts), empty

    def encode_rows(self, rows: Iterator[Row]) -> tuple[dict[str, np.ndarray], int]:
        """Return (datasets of a shard with ``rows``, number of skipped empty rows). Local. Raises DataError.

        A chat has no other tokens than its text. The end of a completion is trained.
        """
        parts: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        empty = 0
        marked = ((row, *chats.marked_text(row, self.template)) for row in rows)
        for batch in _batches((item, item[1]) for item in marked):
            encodings = self._library.encode_batch([text for _, text, _ in batch], add_special_tokens=False)
            for (row, text, spans), encoding in zip(batch, encodings, strict=True):
                if not text:
                    empty += 1
                    continue
                tokens, trained = encoding.ids, chats.trained_tokens(encoding.offsets, spans)
                if "messages" not in row.value:
                    begin = [] if self.begin is None else [self.begin]
                    tokens = [*begin, *tokens, self.end]
                    trained = np.concatenate([[0] * len(begin), trained, [1]]).astype(np.uint8)
                trained[:1] = 0  # no token predicts the first token
                if not trained.any():
                    raise DataError(f"{row.place()}: no token is trained: the answer has no tokens; remove the row")
                parts.append(np.fromiter(tokens, self.dtype, len(tokens)))
                masks.append(trained)
        return self._datasets(parts) | {"trained": np.concatenate(masks) if masks else np.empty(0, np.uint8)}, empty

    def _datasets(self, parts: list[np.ndarray]) -> dict[str, np.ndarray]:
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        return {"tokens": np.concatenate(parts) if parts else np.empty(0, self.dtype), "document_ends": ends}

    @property
    def _library(self) -> Any:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each rank has one core
        return load_tokenizer(self.content)


def _batches(items: Iterable[tuple[Any, str]]) -> Iterator[list[Any]]:
    # Yield batches of the first elements of ``items``. The second elements are the texts.
    batch: list[Any] = []
    size = 0
    for item, text in items:
        batch.append(item)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def open_encoder(path: Path, end: str = "", begin: str = "") -> Encoder:
    """Return the `Encoder` of ``path``, a tokenizer.json or its folder. Raises DataError.

    ``end``, ``begin``: tokens of document ends and begins. "": the end that the tokenizer defines; no begin.
    """
    path = path / TOKENIZER_NAME if path.is_dir() else path
    try:
        content = regular.read(path, 1 << 30).decode()
        tokenizer = load_tokenizer(content)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; expected a tokenizer.json") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a tokenizer.json: {error}") from error
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    end = end or _default_end(path, vocabulary)
    for option, token in (("--eos", end), ("--bos", begin)):
        if token and token not in vocabulary:
            raise UsageError(f"{option} {token}: {path} has no such token; choose a token of its vocabulary")
    size, first = max(vocabulary.values()) + 1, vocabulary[begin] if begin else None
    return Encoder(content, vocabulary[end], first, size, *chats.open_template(path.parent))


def _default_end(path: Path, vocabulary: dict[str, int]) -> str:
    token = chats.tokenizer_config(path.parent).get("eos_token")
    name = token.get("content") if isinstance(token, dict) else token
    if isinstance(name, str) and name in vocabulary:
        return name
    usual = [name for name in ENDS if name in vocabulary]
    if len(usual) != 1:
        raise UsageError(
            f"{path} does not define the token at the end of a document (it has {', '.join(usual) or 'no usual one'}); "
            "name the token with --eos"
        )
    return usual[0]


def _tokenizers() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise MissingCapabilityError(f"tokenization needs tokenizers ({error}); run {EXTRA}") from error


@lru_cache(1)  # loading a large vocabulary takes a second
def load_tokenizer(content: str, *, adds_tokens: bool = False) -> Any:
    """Return the tokenizer of the library tokenizers with the ``content`` of a tokenizer.json. Raises DataError.

    ``adds_tokens``: True to keep the processor that adds special tokens to texts.
    """
    try:
        tokenizer = _tokenizers().Tokenizer.from_str(content)
    except MissingCapabilityError:
        raise
    except Exception as error:  # the library raises the base class
        raise DataError(f"the tokenizer.json is invalid: {error}; use a file of the tokenizers library") from error
    # A tokenizer.json often cuts texts at the context of its model, or pads them.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if not adds_tokens:
        tokenizer.post_processor = None  # it adds only special tokens, and removes spaces from the offsets of tokens
    return tokenizer


def tokenize(paths: Sequence[Path], encoder: Encoder, reading: Reading, folder: Path, comm: Communicator) -> int:
    """Tokenize the files ``paths`` into shards and an index in ``folder``. Collective over ``comm``.

    Return the number of new shards. Completed shards of an earlier, killed call are kept. Raises HpcdistError.
    """
    prepared: Any = None
    if comm.rank == 0:
        try:
            prepared = _prepare(paths, encoder, reading, folder)
        except HpcdistError as error:
            prepared = error
    prepared = comm.broadcast_object(prepared)
    if isinstance(prepared, HpcdistError):
        raise prepared
    plan, groups, missing, kind, template = prepared
    encoder = replace(encoder, template=template)
    # The largest groups first: ranks then end at about the same time.
    for number in missing[comm.rank :: comm.size]:
        documents = _documents(groups[number], reading, kind)
        encoded = encoder.encode_rows(documents) if kind is Row else encoder.encode(documents)
        _write_shard(folder, number, groups[number], encoder, *encoded, plan)
    comm.barrier()
    if comm.rank == 0 and (missing or not (folder / INDEX_NAME).exists()):
        _write_index(folder, len(groups), encoder, reading, plan)
    comm.barrier()
    return len(missing)


def _shard_path(folder: Path, number: int) -> Path:
    return folder / f"tokens-{number:06d}.h5"


def _prepare(
    paths: Sequence[Path], encoder: Encoder, reading: Reading, folder: Path
) -> tuple[str, list[list[FileRange]], list[int], type, chats.ChatTemplate | None]:
    # Return (digest of the inputs and options, pieces of each shard, numbers of the missing shards, type of the
    # documents, chat template). The template prints the time of the newest input, so the shards do not depend on the
    # time of the call.
    groups = reading.groups(paths)
    if not groups:
        raise DataError(f"{', '.join(map(str, paths[:3]))}: the files are empty; give files with text")
    inputs = [[str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    content: dict[str, Any] = {
        "tokenizer": encoder.digest,
        "end": encoder.end,
        "begin": encoder.begin,
        "inputs": inputs,
    }
    is_rows = any(isinstance(first, Row) for first in islice(_documents([p for g in groups for p in g], reading), 1))
    template = encoder.template if is_rows else None
    if template is not None:
        template = replace(template, seconds=max(path.stat().st_mtime_ns for path in paths) // 10**9)
        content |= {"template": asdict(template)}
    plan = xxhash.xxh3_128_hexdigest(json.dumps(content | asdict(reading)).encode())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic.sweep(folder, 0.0)  # temporary files of a killed call
        atomic.write(folder / TOKENIZER_NAME, encoder.content)
        if template is not None:
            atomic.write(folder / chats.TEMPLATE_NAME, template.text)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror}; choose another --output") from error
    stored = {path: _shard_record(path) for path in sorted(folder.glob("tokens-*.h5"))}
    for path, record in stored.items():
        if record["plan"] != plan:
            raise UsageError(
                f"{path} was made from other files, another tokenizer or other options; choose another --output"
            )
    missing = [number for number in range(len(groups)) if _shard_path(folder, number) not in stored]
    sizes = [
        sum(piece.stop - piece.start if piece.stop >= 0 else os.stat(piece.path).st_size for piece in g) for g in groups
    ]
    missing.sort(key=lambda number: -sizes[number])
    return plan, groups, missing, Row if is_rows else str, template


def _documents(pieces: Sequence[FileRange], reading: Reading, kind: type = object) -> Iterator[Any]:
    for piece in pieces:
        for document in reading.documents(piece):
            if not isinstance(document, kind):
                raise DataError(
                    f"{piece.path}: texts and rows with messages or completions cannot be mixed; tokenize them into "
                    "separate directories, and train on a mixture"
                )
            yield document


def _write_shard(
    folder: Path,
    number: int,
    pieces: Sequence[FileRange],
    encoder: Encoder,
    datasets: dict[str, np.ndarray],
    empty: int,
    plan: str,
) -> None:
    from hpcdist.hdf5 import files

    path = _shard_path(folder, number)
    new = atomic.temporary_path(path)
    attributes = {"plan": plan, "empty": empty, "digest": _digest(*datasets.values()), "tokenizer": encoder.digest}
    attributes |= {"inputs": json.dumps(pieces)}
    if "trained" in datasets:
        attributes["trained"] = int(datasets["trained"].sum())
    try:
        files.write_contiguous(new, datasets, attributes, schema=SHARD_SCHEMA, version=SHARD_VERSION)
        os.replace(new, path)
    except OSError as error:
        atomic.discard(new)
        raise StorageError(f"{path} cannot be written: {error.strerror or error}; check the disk") from error


def _digest(*arrays: np.ndarray) -> str:
    state = xxhash.xxh3_128()
    for array in arrays:
        state.update(array.view(np.uint8).data if array.size else b"")
    return state.hexdigest()


def _shard_record(path: Path) -> dict[str, Any]:
    from hpcdist.hdf5 import files

    with files.open_read(path, SHARD_SCHEMA, SHARD_VERSION) as file, regular.damage(path, "remove it"):
        tokens, ends = files.resolved(file, "tokens"), files.resolved(file, "document_ends")
        record = {name: file.attrs[name] for name in ("plan", "digest")}
        if "trained" in file:
            record |= {"trained": int(file.attrs["trained"])}
            record |= {"trained_offset": files.offset_in_file(files.resolved(file, "trained")) or 0}
        return record | {
            "empty": int(file.attrs["empty"]),
            "tokens": len(tokens),
            "documents": len(ends),
            "offset": files.offset_in_file(tokens) or 0,
            "ends_offset": files.offset_in_file(ends) or 0,
        }


def _write_index(folder: Path, count: int, encoder: Encoder, reading: Reading, plan: str) -> None:
    shards = []
    for number in range(count):
        path = _shard_path(folder, number)
        record = _shard_record(path)
        del record["plan"]
        shards.append({"file": path.name, **record})
    if not any(shard["tokens"] for shard in shards):
        raise DataError(f"{folder}: the files have no document with text; give files with text")
    index: dict[str, Any] = {
        "schema": INDEX_SCHEMA,
        "version": INDEX_VERSION,
        "plan": plan,
        "tokenizer": encoder.digest,
        "vocabulary": encoder.vocabulary,
        "dtype": encoder.dtype.name,
        "end": encoder.end,
        "begin": encoder.begin,
        "reading": asdict(reading),
        **{name: sum(shard[name] for shard in shards) for name in COUNTS if name in shards[0]},
        "shards": shards,
    }
    atomic.save(folder / INDEX_NAME, json.dumps(index, indent=1) + "\n", "check the disk")


def damaged_shards(folder: Path) -> list[str]:
    """Return the names of the shards in ``folder`` whose content differs from the digests in the index. Local."""
    data, damaged = open_directory(folder), []
    assert data.shard_ends is not None
    stored = [shard for shard in read_index(folder)["shards"] if shard["tokens"]]
    for number, shard in enumerate(stored):
        first = data.tokens.first(number)
        try:
            place = slice(first, first + shard["tokens"])
            masks = [] if data.trained is None else [data.trained[place]]
            is_intact = _digest(data.tokens[place], data.shard_ends(number), *masks) == shard["digest"]
        except StorageError:
            is_intact = False
        if not is_intact:
            damaged.append(shard["file"])
    return damaged


def first_texts(folder: Path, count: int) -> list[str]:
    """Return the decoded texts of the first ``count`` documents in the token directory ``folder``. Local."""
    data = open_directory(folder)
    assert data.shard_ends is not None
    tokenizer = load_tokenizer(regular.read(folder / TOKENIZER_NAME, 1 << 30).decode())
    ends = data.shard_ends(0)[:count].tolist()
    spans = zip([0, *ends], ends, strict=False)
    return [tokenizer.decode(data.tokens[start:end].tolist(), skip_special_tokens=True) for start, end in spans]


def train_tokenizer(paths: Sequence[Path], vocabulary: int, reading: Reading, out: Path) -> int:
    """Train a byte-level BPE tokenizer of ``vocabulary`` tokens on the files ``paths``, and write it to ``out``.

    Return the number of its tokens, which is smaller for short texts. Raises HpcdistError.
    """
    library = _tokenizers()
    atomic.check_folder(out)
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[ENDS[0]],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = [piece for group in reading.groups(paths) for piece in group]
    documents = _documents(pieces, reading)
    tokenizer.train_from_iterator((one.text if isinstance(one, Row) else one for one in documents), trainer)
    atomic.save(out, tokenizer.to_str(pretty=True), "choose another --output")
    return int(tokenizer.get_vocab_size())
