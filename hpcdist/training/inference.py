"""Load a trained model for evaluation and sampling: only its parameters, on any number of ranks.

Each rank reads its share of the parameters, and all ranks gather the rest. The flight recorder writes to a separate
folder, which is kept if the evaluation fails.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Ledger
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.gpu import device
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint import listing
from hpcdist.checkpoint.listing import AVERAGES, PARAMETERS
from hpcdist.checkpoint.manifest import Manifest
from hpcdist.checkpoint.restoring.restore import from_newest_intact, newest_complete, on_first_rank
from hpcdist.collectives import SHARDED, allreduce
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.failure.exits import USER_ERRORS
from hpcdist.comm.launch import environment
from hpcdist.comm.start import Session, start, start_alone
from hpcdist.constants import RECIPE_FILE
from hpcdist.errors import DataError, MissingCapabilityError, StorageError, UsageError
from hpcdist.models import factory
from hpcdist.models.arena import Arena
from hpcdist.models.attention.cache import CachedDecoder
from hpcdist.models.config import TRANSFORMERS
from hpcdist.models.model import Model
from hpcdist.optim import kernels
from hpcdist.strategies.core.exchange import pieces_of
from hpcdist.training import data
from hpcdist.training.build.model import build_model
from hpcdist.training.build.state_source import restore_converted, scalars_of
from hpcdist.training.data.source import usable_inputs
from hpcdist.training.generation import Decoder, WindowDecoder, generate
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe.recipe import Recipe
from hpcdist.training.text import TextCodec, TextStream, codec_of

# Errors that need no flight recorder: its files are deleted.
EXPECTED_ERRORS: Final = (GeneratorExit, KeyboardInterrupt, *USER_ERRORS)
RECORDER_PREFIX: Final = "recorder-evaluate-"  # prefix of the folder name; `hpcdist hang` reads such folders


@dataclass
class TrainedModel:
    """Model restored from a checkpoint for evaluation, with all parameters on every rank of ``comm``."""

    comm: Communicator
    path: Path
    recipe: Recipe
    model: Model
    parameters: FlatStore
    scalars: dict[str, Any]
    ledger: Ledger
    arena: Arena = field(init=False)

    def __post_init__(self) -> None:
        self.arena = Arena(self.ledger, self.recipe.run.device)
        self._views = self.model.bind(self.parameters)

    @property
    def steps(self) -> int:
        """Number of training steps that were completed before the checkpoint was saved."""
        return int(self.scalars["steps"])

    def logits(self, inputs: np.ndarray) -> np.ndarray:
        """Return the model's logits for the input array ``inputs``. Both arrays are on the host. Local."""
        placed = backend.place(inputs, self.recipe.run.device)
        return backend.to_host(self.model.logits(self._views, placed, self.arena))

    def decoder(self, texts: int) -> Decoder:
        """Return a decoder for ``texts`` texts, with a key-value cache if the model is a gpt. Local."""
        model, context = self.recipe.model, self.recipe.data.context
        if model.kind == "gpt" and not model.capacity_factor:  # a capacity depends on all tokens of a text
            return CachedDecoder(self.model, self._views, self.arena, texts, context)
        return WindowDecoder(self.logits, context)

    def validation_loss(self) -> float:
        """Return the mean validation loss, or NaN without validation data. Collective.

        Raises DataError if the data differs from the data of the training.
        """
        # If no digest of the data is cached, only a few elements are compared.
        recipe = self.recipe
        source = data.open_source(recipe.data, recipe.model, self.comm, kept_only=True)
        if not source.matches(self.scalars):
            raise DataError(
                f"the run in {self.path} was trained on other data than {source.description}; "
                "provide the data of that run"
            )
        sums = np.zeros(2)
        for inputs, targets in source.validation_batches(recipe, self.comm.size, self.comm.rank):
            if len(inputs):
                batch = source.place((inputs, targets), recipe)
                loss, weight = self.model.weighted_loss(self._views, *batch, self.arena)
                targets_seen = source.targets_in(targets, self.model.tokens_per_sample)
                sums += (loss, weight if self.model.loss.weighs else targets_seen)
        allreduce(self.comm, sums)
        return float(sums[0] / sums[1]) if sums[1] else float("nan")


def load(
    comm: Communicator, path: Path, recipe: Recipe, trust: bool = False, *, averaged: bool = False
) -> TrainedModel:
    """Restore the model of run directory ``path`` from the newest checkpoint with intact parameters. Collective.

    ``recipe``: recipe of the run. ``trust``: True to execute the model factory file even after a change. ``averaged``:
    True for the moving average of the parameters. Raises StorageError if no checkpoint is intact, and UsageError if
    the factory file has changed and ``trust`` is False, or if there is no average.
    """
    if recipe.model.kind == "given":
        raise UsageError(
            f"the model of {path} is defined in the script that trained it, so the recipe cannot build the model. "
            "Evaluate it in that script, or train with model.kind = 'import' and model.factory = 'file.py:function'"
        )
    newest = newest_complete(path, comm)
    return from_newest_intact(
        path, comm, newest, lambda checkpoint: _loaded(comm, path, checkpoint, recipe, trust, averaged)
    )


def _loaded(
    comm: Communicator, path: Path, checkpoint: Path | None, recipe: Recipe, trust: bool, averaged: bool
) -> TrainedModel:
    if checkpoint is None:
        raise StorageError(
            f"{path} holds no valid checkpoint; finish the training in this run directory first (a training saves a "
            "checkpoint at its end)"
        )
    stored = on_first_rank(comm, lambda: listing.load_parameters(checkpoint, averaged=averaged))
    scalars = scalars_of(checkpoint, stored)
    lacking = [name for name in ("steps", "data") if name not in scalars]
    if lacking:
        raise StorageError(
            f"{checkpoint} lacks {', '.join(lacking)}, so it is not from a training of hpcdist; use another checkpoint"
        )
    if recipe.model.kind == "import" and not trust:
        _check_factory(comm, path, recipe.model.factory, stored.about.get("factory"))
    model = build_model(recipe, recipe.precision.computes, _inputs(checkpoint, recipe, scalars))
    _check_shapes(checkpoint, model, stored)
    ledger = Ledger()
    parameters = FlatStore(model.layout, model.dtype, on=recipe.run.device, ledger=ledger)
    sharding, kind = SHARDED["native"], AVERAGES if averaged else PARAMETERS
    shares = sharding.shares(comm, parameters.size, parameters.dtype.itemsize)
    dtypes = {entry.tensor: entry.dtype for entry in stored.pieces}
    restore_converted(comm, checkpoint, pieces_of({kind: parameters}, [shares[comm.rank]]), dtypes)
    sharding.all_gather(comm, parameters.array, shares)
    if recipe.precision.working is not None:  # the run computed with rounded parameters, also its validation loss
        working = backend.empty(parameters.size, dtype_of(recipe.precision.working), recipe.run.device)
        kernels.round_into(parameters.array, working)
        kernels.widen(working, parameters.array)
    if model.operations.experts is not None:
        model.operations.experts.state.restore(scalars)
    return TrainedModel(comm, checkpoint, recipe, model, parameters, scalars, ledger)


def _check_factory(comm: Communicator, path: Path, named: str, seal: object) -> None:
    if not comm.broadcast_object(factory.is_sealed(named, seal) if comm.rank == 0 else None):
        reason = (
            "differs from the file with which this user trained the model"
            if seal
            else "was not recorded by its training, so hpcdist cannot verify that the file is the same"
        )
        raise UsageError(
            f"model.factory = {named!r} in the recipe of {path} names a file that {reason}; read the code in this "
            "file, and add --trust to execute the code"
        )


def _inputs(path: Path, recipe: Recipe, scalars: Mapping[str, Any]) -> dict[str, int]:
    stored = scalars.get("model_inputs")
    # Old checkpoints have no model_inputs.
    if recipe.model.kind in TRANSFORMERS or stored is None:
        return {"context": recipe.data.context}
    inputs = usable_inputs(stored)
    if not inputs:
        raise StorageError(
            f"{path} is not valid: the entry model_inputs of the manifest is {str(stored)[:80]}; expected a dict of "
            "positive integers. Restore the checkpoint from a copy, or delete it"
        )
    return inputs


def _check_shapes(path: Path, model: Model, stored: Manifest) -> None:
    shapes = {entry.tensor: entry.shape for entry in stored.pieces}
    for segment in model.layout.segments:
        shape = shapes.get(segment.key)
        if shape != segment.spec.shape:
            fault = "is missing" if shape is None else f"has the shape {list(shape)}"
            raise StorageError(
                f"{path}: the stored tensor {PARAMETERS}/{segment.key} {fault}; the recipe's model expects shape "
                f"{list(segment.spec.shape)}; use the recipe that saved the checkpoint"
            )


def on_available_device(recipe: Recipe) -> Recipe:
    """Return ``recipe``, or a copy with run.device = "cpu" if the recipe needs a GPU but there is no GPU. Local."""
    if recipe.run.device == "gpu":
        try:
            device.count()
        except MissingCapabilityError as error:
            print(f"hpcdist: {error}. The CPU is used instead", file=sys.stderr)
            return replace(recipe, run=replace(recipe.run, device="cpu"))
    return recipe


class InspectionSession:
    """Context manager for evaluating the model of run directory ``path``. ``alone``: True to use only this process."""

    def __init__(self, path: Path, alone: bool = False) -> None:
        self.path, self.recipe = path, on_available_device(recipes.load_stored(path / RECIPE_FILE))
        communication = self.recipe.communication
        self.session: Session = (
            start_alone()
            if alone
            else start(self.recipe.run.device, communication.ranks_per_node or None, communication.checked)
        )
        self._records = _folder_for_records(self.session.comm, path)
        self.session.record(self._records, communication.deadline_s)

    def load(self, trust: bool = False, *, averaged: bool = False) -> TrainedModel:
        """Load the newest intact model, as `load` does. Collective."""
        return load(self.session.comm, self.path, self.recipe, trust, averaged=averaged)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, EXPECTED_ERRORS):
            return  # keep the flight recorder: it shows the last operation of each rank
        self.session.stop_recording()
        if kind is None:
            self.session.comm.barrier()  # all ranks have closed their files
        shutil.rmtree(self._records, ignore_errors=True)


def _folder_for_records(comm: Communicator, path: Path) -> Path:
    name = None
    if comm.rank == 0:
        try:
            name = tempfile.mkdtemp(prefix=RECORDER_PREFIX, dir=path)
        except OSError:  # a run of another user: evaluating it needs no permission to write
            name = tempfile.mkdtemp(prefix=f"hpcdist-{RECORDER_PREFIX}")
    folder = Path(comm.broadcast_object(name))
    (folder / "recorder").mkdir(parents=True, exist_ok=True)  # each node has a separate temporary folder
    return folder


def sample(
    path: Path,
    prompts: Sequence[str],
    tokens: int,
    *,
    temperature: float,
    top_k: int,
    seed: int,
    top_p: float = 1.0,
    stops: Sequence[str] = (),
    averaged: bool = False,
    tokenizer: Path | None = None,
    chat: bool = False,
) -> Iterator[str]:
    """Yield the text of the model in the run directory ``path`` for each of ``prompts``, which it begins with.

    A text has at most ``tokens`` new tokens, and ends at an end token of the tokenizer, or before one of the texts
    ``stops``. ``averaged``: True for the moving average of the parameters. ``tokenizer``: see `text.codec_of`.
    ``chat``: True for prompts that are messages of a user. A single text comes in parts. Ranks above 0 yield nothing.
    """
    variables = environment.launch_environment()
    if variables is not None and variables.rank:
        return
    with InspectionSession(path, alone=True) as look:
        model = look.recipe.model
        if model.kind == "given":
            raise UsageError(
                f"the model of {path} is defined in the script that trained it; generate text in that script. `sample` "
                "needs a gpt"
            )
        if model.kind != "gpt":
            raise UsageError(f"{path} holds a model of kind {model.kind!r}; only a gpt can generate text")
        if not all(prompts):
            raise UsageError("a prompt is empty; give at least one character with each --prompt")
        codec = codec_of(path, look.recipe, tokenizer)
        begins = [(codec.chat if chat else codec.encode_document)(one) for one in prompts]
        options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        parts = continuations(look.load(averaged=averaged), codec, begins, tokens, stops=stops, **options)
        written = [""] * len(prompts) if chat else list(prompts)
        if len(prompts) == 1:
            yield written[0]
            yield from (part for _, part in parts)
            yield "\n"
            return
        for index, part in parts:
            written[index] += part
        yield "\n---\n".join(written) + "\n"


def continuations(
    model: TrainedModel,
    codec: TextCodec,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    stops: Sequence[str] = (),
    **options: Any,
) -> Iterator[tuple[int, str]]:
    """Yield (index of a prompt, next part of the text after it), for at most ``tokens`` tokens per prompt. Local.

    A text ends at an end token of ``codec``, or before one of the texts ``stops``. ``options``: see `generate`.
    """
    texts, ended = [TextStream(codec.decode, stops, prompt) for prompt in prompts], set[int]()
    ends = [(end,) for end in codec.ends]
    decoder = model.decoder(len(prompts))
    for index, token in generate(decoder, prompts, tokens, stops=ends, ended=ended, **options):
        if token not in codec.ends:
            yield index, texts[index].add(token)
        if texts[index].ended:
            ended.add(index)
    yield from ((index, text.finish()) for index, text in enumerate(texts))
