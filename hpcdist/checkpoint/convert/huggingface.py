"""Directories of Hugging Face: read the tensors of ``model.safetensors`` as pieces of hpcdist, in any layout.

A rank reads only the elements that it holds, in blocks.
"""

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

import numpy as np

from hpcdist import models
from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import FLOATS, dtype_of
from hpcdist.arrays.filestore import FileSlice
from hpcdist.arrays.piece import Box, Piece, whole_box
from hpcdist.arrays.ranges import Range, cut
from hpcdist.checkpoint.convert import dcp, families, gguf_file
from hpcdist.checkpoint.convert.exporting import piece_in_file
from hpcdist.checkpoint.convert.families import CONFIG
from hpcdist.checkpoint.convert.importing import ForeignFile
from hpcdist.checkpoint.convert.tensor_names import mapped_tensors, prefix_of
from hpcdist.checkpoint.listing import PARAMETERS, StoredTensor
from hpcdist.checkpoint.manifest import BLOCK_BYTES
from hpcdist.errors import ConfigurationError, StorageError
from hpcdist.models.config import ModelConfig

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
IGNORED: Final = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # buffers without parameters
SETTINGS: Final = "huggingface"  # in a run directory: settings and tokenizer of the imported model
HEAD: Final = "lm_head.weight"
# Files of a tokenizer and its settings, which an export copies unchanged.
COPIED: Final = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)


def copy_settings(source: Path, target: Path) -> None:
    """Write the tokenizer and the settings of the model ``source`` to the directory ``target``. See `is_source`."""
    files = gguf_file.read_settings(source) if source.is_file() else {}
    source = source.parent if source.is_file() else source
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (target / name).write_text(json.dumps(content, ensure_ascii=False))
        for name in ("tokenizer.json",) if files else (CONFIG, *COPIED):
            if name not in files and (source / name).is_file():
                shutil.copyfile(source / name, target / name)
    except OSError as error:
        raise StorageError(f"{error.filename} cannot be copied to {target}: {error.strerror}") from error


class HuggingFaceDirectory(ForeignFile):
    """Open model, see `families.is_source`: its tensors have the names and shapes of hpcdist.

    ``dtype``: type to which `pieces` converts the elements. ``whole``: False to skip checks that read tensors. Raises
    HpcdistError.
    """

    def __init__(self, path: Path, dtype: str = "float32", *, whole: bool = True) -> None:
        self.directory, self.dtype = path, dtype
        self.config = families.read_config(path)
        self.model = ModelConfig(**families.model_keys(self.config))
        super().__init__(_tensor_file(path))
        self.format, self.metadata = "huggingface", {}
        try:
            self._stored, self._index = self.tensors, {one.name: number for number, one in enumerate(self.tensors)}
            layout = models.build(self.model, context=families.context_of(self.config)).layout
            family = self.config["model_type"]
            prefixed = any(name.startswith(prefix_of(family)) for name in self._index)
            self.mapped = mapped_tensors(family, layout, prefixed)
            self.left_out = self._check(whole)
        except BaseException:
            self.reader.close()
            raise
        self.tensors = [StoredTensor(PARAMETERS, name, dtype, one.shape) for name, one in self.mapped.items()]

    def check_model(self, model: ModelConfig) -> None:
        """Raise ConfigurationError if the section [model] of a recipe, ``model``, describes another model."""
        ours, theirs = families.canonical(model), families.canonical(self.model)
        for item in fields(ours):
            values = getattr(ours, item.name), getattr(theirs, item.name)
            if values[0] != values[1]:
                raise ConfigurationError(
                    f"model.{item.name} is {values[0]!r}, but {values[1]!r} in {self.directory / CONFIG}; remove the "
                    "key from the recipe"
                )

    def pieces(self) -> list[Piece]:
        """Return a list with one `Piece` per tensor of hpcdist. The elements are read on demand."""
        return [piece_in_file(tensor, _WholeTensor(self, tensor.name, dtype_of(self.dtype))) for tensor in self.tensors]

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Read the elements of ``pieces`` into their arrays, converted to the type of each array. Local."""
        for piece in pieces:
            target = piece.array
            for part in cut(Range(0, piece.flat.size), BLOCK_BYTES // target.dtype.itemsize):
                block = np.empty(part.size, target.dtype)
                self.read(piece.tensor, piece.box, part.shift(piece.flat.start), block)
                if isinstance(target, FileSlice):
                    target.write(part, block)
                else:
                    target[part.slice] = backend.namespace(target).asarray(block)

    def read(self, name: str, box: Box, flat: Range, out: np.ndarray) -> None:
        """Fill ``out`` with the elements ``flat`` of the region ``box`` of the tensor ``name`` of hpcdist.

        Raises StorageError if an element is NaN or infinite.
        """
        for region in self.mapped[name].regions(box, flat):
            number = self._index[region.name]
            values = np.empty(region.file.size, dtype_of(self._stored[number].dtype))
            with self.library_errors():
                self.reader.read(number, region.file, values)
            out[region.local] = values
        if not np.isfinite(out).all():
            names = ", ".join(self.mapped[name].stack.names)
            raise StorageError(
                f"{self.directory}: a value of {names} is NaN or infinite; use another copy of the model"
            )

    def _check(self, whole: bool) -> list[str]:
        # Returns the names of ignored tensors.
        left = dict(self._index)
        ignored = [name for name in left if name.endswith(IGNORED)]
        for name in ignored:
            del left[name]
        for mapped in self.mapped.values():
            for name in mapped.stack.names:
                number, shape = left.pop(name, None), mapped.stack.shape
                if number is None:
                    raise StorageError(
                        f"{self.directory} lacks the tensor {name} of shape {list(shape)}; copy it again"
                    )
                stored = self._stored[number]
                if stored.shape != shape or stored.dtype not in FLOATS:
                    raise StorageError(
                        f"{self.directory}: {name} is {stored.dtype}{list(stored.shape)}, but {CONFIG} needs "
                        f"floating-point numbers of shape {list(shape)}; correct {CONFIG}, or copy the directory again"
                    )
        if self.model.tied and HEAD in left:
            ignored.append(HEAD)
            number = left.pop(HEAD)
            if whole:
                self._check_tied(number)
        if left:
            raise StorageError(
                f"{self.directory} has the tensor {next(iter(left))}, which a model of type "
                f"{self.config['model_type']!r} does not have; use a directory of the plain language model"
            )
        return ignored

    def _check_tied(self, number: int) -> None:
        embedding = self._index[self.mapped["0.tokens.weight"].stack.names[0]]
        pair = [self._stored[index] for index in (number, embedding)]
        same = (pair[0].shape, pair[0].dtype) == (pair[1].shape, pair[1].dtype)
        dtype = dtype_of(pair[0].dtype)
        for part in cut(Range(0, pair[0].size), BLOCK_BYTES // dtype.itemsize) if same else ():
            blocks = [np.empty(part.size, dtype) for _ in pair]
            for index, block in zip((number, embedding), blocks, strict=True):
                with self.library_errors():
                    self.reader.read(index, part, block)
            same = same and blocks[0].tobytes() == blocks[1].tobytes()
        if not same:
            raise StorageError(
                f"{self.directory}: tie_word_embeddings is true, but {HEAD} differs from {pair[1].name}; set "
                f"tie_word_embeddings to false in {CONFIG}, or remove {HEAD}"
            )


def _tensor_file(path: Path) -> Path:
    if path.suffix == families.GGUF_SUFFIX:
        return path
    for name in (INDEX, SINGLE, dcp.METADATA):
        if (path / name).is_file():
            return path / name
    pickled = sorted(file.name for pattern in ("*.bin", "*.pth") for file in path.glob(pattern))
    reason = f"; {pickled[0]} is not read: convert it with save_pretrained of transformers" if pickled else ""
    raise StorageError(f"{path} has neither {SINGLE} nor {INDEX}{reason or '; copy the directory again'}")


@dataclass(frozen=True)
class _WholeTensor:
    source: HuggingFaceDirectory
    name: str
    dtype: np.dtype

    def read(self, elements: Range, out: np.ndarray) -> None:
        self.source.read(self.name, whole_box(self.source.mapped[self.name].shape), elements, out)
