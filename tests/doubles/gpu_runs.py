"""What is run on the CPU and on a GPU, real or double, to compare: models, optimizers, whole trainings on threads.

Every class and function takes the place to compute, "cpu" or "gpu"; nothing here knows which cupy that is.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from hpcdist import models
from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.ranges import split as split_range
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.handover import Handover
from hpcdist.comm.placement import locate
from hpcdist.comm.start import Session
from hpcdist.models.config import ModelConfig
from hpcdist.models.runtime import split_backward
from hpcdist.models.runtime.arena import Arena
from hpcdist.models.stage import IGNORED, Draw
from hpcdist.models.transformer import masked_predictions
from hpcdist.optim import optimizer
from hpcdist.optim.config import OptimizerConfig
from hpcdist.training.build.assemble import assemble
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.loop import mean_validation_loss

Batches = list[tuple[np.ndarray, np.ndarray]]

LLAMA = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "kv_heads": 2, "bias": False}
GPT = {"layers": 2, "hidden": 12, "heads": 3, "vocabulary": 11}
MODELS = {
    "gpt": (ModelConfig(**GPT), {"context": 7}),
    "gpt tied": (ModelConfig(**GPT, tied=True), {"context": 7}),
    "gpt, more than one block of queries": (ModelConfig(**GPT), {"context": 70}),
    "gpt tied, dropout": (ModelConfig(**GPT, tied=True, dropout=0.2), {"context": 70}),
    "gpt with the options of Llama": (
        ModelConfig(**LLAMA, layers=2, hidden=16, heads=4, vocabulary=11),
        {"context": 70},
    ),
    "encoder": (ModelConfig(kind="encoder", **GPT), {"context": 9}),
    "encoder with the options of Llama": (
        ModelConfig(kind="encoder", **LLAMA, layers=1, hidden=16, heads=4, vocabulary=11),
        {"context": 9},
    ),
    "convnet, bytes": (
        ModelConfig(kind="convnet", layers=3, hidden=4, activation="relu"),
        {"height": 5, "width": 6, "channels": 3, "classes": 4},
    ),
    "convnet rms, dropout": (
        ModelConfig(kind="convnet", layers=3, hidden=4, norm="rms", dropout=0.3),
        {"height": 4, "width": 1, "channels": 2, "classes": 3},
    ),
    "mlp gelu": (ModelConfig(kind="mlp", layers=2, hidden=9), {"features": 5, "classes": 4}),
    "mlp relu, bytes": (ModelConfig(kind="mlp", layers=1, hidden=9, activation="relu"), {"features": 5, "classes": 4}),
    "mlp, dropout": (ModelConfig(kind="mlp", layers=2, hidden=9, dropout=0.4), {"features": 5, "classes": 4}),
}
MICROBATCHES = 2


def batches_of(case: str, rng: np.random.Generator) -> Batches:
    config, inputs = MODELS[case]
    found = []
    for samples in range(3, 3 + MICROBATCHES):
        if config.kind == "gpt":
            tokens = rng.integers(0, config.vocabulary, (samples, inputs["context"] + 1)).astype(np.uint8)
            found.append((tokens[:, :-1].copy(), tokens[:, 1:].copy()))
        elif config.kind == "encoder":
            tokens = rng.integers(0, config.vocabulary, (samples, inputs["context"])).astype(np.uint8)
            targets = np.full(tokens.shape, IGNORED)
            targets[:, 2 : 2 + masked_predictions(inputs["context"])] = 5
            found.append((tokens, targets))
        else:
            features = inputs.get(
                "features", inputs.get("height", 1) * inputs.get("width", 1) * inputs.get("channels", 1)
            )
            x = rng.integers(0, 256, (samples, features)).astype(np.uint8)
            found.append((x if "bytes" in case else x / 64 - 2, rng.integers(0, inputs["classes"], samples)))
    return found


def placed(batches: Batches, on: str) -> Batches:
    return [(backend.place(x, on), backend.place(targets, on)) for x, targets in batches]


class ModelRun:
    """A model on ``on`` with parameters that are larger than initial ones, so that every path matters."""

    def __init__(self, case: str, dtype: str, on: str, seed: int) -> None:
        config, inputs = MODELS[case]
        self.model = models.build(config, dtype, **inputs)
        start = FlatStore(self.model.layout, self.model.dtype)
        drawn = np.random.default_rng(seed)
        for segment in self.model.layout.segments:
            start.view(segment.key)[...] = drawn.standard_normal(segment.spec.shape) * 0.5
        self.store, self.gradient = (FlatStore(self.model.layout, self.model.dtype, on=on) for _ in range(2))
        self.store.copy_from(start)
        self.parameters, self.into = self.model.bind(self.store), self.model.bind_gradients(self.gradient)
        self.arena = Arena(on=on)
        self.seed, self.number = seed, 1  # of a step, as masks see them

    def draw(self, first_sample: int) -> Draw:
        """What a micro-batch drops."""
        return Draw(self.seed, self.number, first_sample)

    def step(self, batches: Batches) -> list[backend.Scalar]:
        """Return the loss of each micro-batch, where it was computed; the gradient is left in its store."""
        for stage in self.into:
            stage.begin_step()
        losses, first = [], 0
        for number, (x, targets) in enumerate(batches):
            logits = self.model.forward(self.parameters, x, self.arena, number, self.draw(first))
            first += len(x)
            saved = self.arena.saved(self.model.stages[-1].layer, number)
            losses.append(self.model.loss.forward(logits, targets, self.model.operations, saved))
            self.model.backward(self.parameters, self.into, 0.25, self.arena, number)
        for stage in self.into:
            stage.finish()
        return losses

    def split_step(self, batches: Batches, together: bool) -> None:
        """Do the backward of `step` in two passes, the second of all micro-batches at the end, or ``together``.

        Memory that nobody holds any more is spoiled in between.
        """
        model, two_passes = self.model, split_backward.split_operations(self.model.operations)
        stages = list(zip(model.stages, self.parameters, self.into, strict=True))[::-1]
        for stage in self.into:
            stage.begin_step()
        first = 0
        for number, (x, targets) in enumerate(batches):
            logits = model.forward(self.parameters, x, self.arena, number, self.draw(first))
            first += len(x)
            saved = self.arena.saved(model.stages[-1].layer, number)
            model.loss.forward(logits, targets, model.operations, saved)
            d = model.loss.backward(0.25, model.operations, saved)
            for stage, views, into in stages:
                saved = self.arena.saved(stage.layer, number)
                d = stage.backward(views, into, d, two_passes, saved)
                split_backward.release_first_pass(saved)
            self._spoil()
            if together:
                self._weights(number, stages)
        if not together:
            for number in range(len(batches)):
                self._weights(number, stages)
        for stage in self.into:
            stage.finish()

    def _weights(self, number: int, stages: list) -> None:
        for stage, views, into in stages:
            saved = self.arena.saved(stage.layer, number)
            split_backward.weight_gradients(dict.fromkeys(views), into, self.model.operations, saved)
            saved.release()
            self._spoil()

    def _spoil(self) -> None:
        for block in [self.arena._blocks[index] for _, index in self.arena._free]:
            block[...] = 0xFF
        for name, block in self.arena._scratch.items():
            if name != "linear.dweight":
                block[...] = 0xFF


TENSORS = Layout.of(
    [TensorSpec(0, "table", (11, 7)), TensorSpec(1, "weight", (33, 19)), TensorSpec(1, "b", (5,), False)]
)
OPTIMIZERS = {
    "sgd": OptimizerConfig(name="sgd", momentum=0.0, weight_decay=0.01),
    "sgd, heavy ball": OptimizerConfig(name="sgd", momentum=0.9),
    "sgd, nesterov": OptimizerConfig(name="sgd", momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": OptimizerConfig(name="adamw", weight_decay=0.1),
    "lars": OptimizerConfig(name="lars", momentum=0.9, weight_decay=0.01),
    "lamb": OptimizerConfig(name="lamb", weight_decay=0.1),
    "lamb, not corrected": OptimizerConfig(name="lamb", bias_correction=False, trust_ratio_max=0.5),
}
UPDATES = 5


def drawn(rng: np.random.Generator, dtype: str) -> FlatStore:
    store = FlatStore(TENSORS, dtype_of(dtype))
    for segment in TENSORS.segments:
        store.view(segment.key)[...] = rng.standard_normal(segment.spec.shape)
    return store


class OptimizerRun:
    """One optimizer over two shards, as two ranks would hold them, with a working copy in another dtype."""

    def __init__(self, name: str, dtype: str, on: str, start: FlatStore, working: str) -> None:
        real = dtype_of(dtype)
        self.parts = split_range(TENSORS.size, 2, 4)
        self.optimizers = [
            optimizer.build(OPTIMIZERS[name], TENSORS, part, real, total_steps=UPDATES, on=on) for part in self.parts
        ]
        self.master, self.gradient = (FlatStore(TENSORS, real, on=on) for _ in range(2))
        self.working = FlatStore(TENSORS, dtype_of(working), on=on)
        self.master.copy_from(start)

    def step(self, gradient: FlatStore) -> None:
        self.gradient.copy_from(gradient)
        for rule, part in zip(self.optimizers, self.parts, strict=True):
            rule.begin_step()
            rule.direction(part, self.master, self.gradient, 0.5)
        norms = sum(rule.partial_norms() for rule in self.optimizers) if self.optimizers[0].needs_norms else None
        for rule, part in zip(self.optimizers, self.parts, strict=True):
            rule.apply(part, self.master, self.gradient, self.working, norms)

    def stores(self) -> list[FlatStore]:
        """The weights and every slot."""
        return [self.master, *(slot for rule in self.optimizers for slot in rule.slots.values())]


STEPS = 4
SETTINGS: dict[str, object] = {
    "model.layers": 2,
    "model.hidden": 16,
    "model.heads": 2,
    "model.tied": "true",
    "data.context": 8,
    "run.steps": STEPS,
    "run.global_batch": 7,
    "run.validation_samples": 5,
    "optimizer.warmup_steps": 2,
    "optimizer.clip_norm": 0.5,
    "communication.algorithm": "ring",
}
TWO = {"parallel.microbatches": 2}
PIPELINE = {"parallel.pipeline": 2, "parallel.microbatches": 3, "run.global_batch": 12}
SERVER = {"parallel.strategy": "parameter_server", **TWO}
# An architecture: the numbers of ranks that it runs on, and its keys.
LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, object]]] = {
    "allreduce": ((1, 2, 4), {"parallel.strategy": "allreduce", "communication.bucket_bytes": 4096, **TWO}),
    "zero1": ((1, 2, 4), {"parallel.strategy": "zero1", **TWO}),
    "zero2": ((1, 2, 4), {"parallel.strategy": "zero2", **TWO}),
    "zero3": ((1, 2, 4), {"parallel.strategy": "zero3", **TWO}),
    "zero2, lamb": ((2,), {"parallel.strategy": "zero2", "optimizer.name": "lamb", **TWO}),
    "gpipe": ((2, 4), {"parallel.schedule": "gpipe", **PIPELINE}),
    "1f1b": ((2, 4), {"parallel.schedule": "1f1b", **PIPELINE}),
    "1f1b, recomputing": ((2, 4), {"parallel.schedule": "1f1b", "parallel.recompute": "true", **PIPELINE}),
    "gpipe, recomputing": ((2,), {"parallel.schedule": "gpipe", "parallel.recompute": "true", **PIPELINE}),
    "1f1b x zero1": ((4,), {"parallel.strategy": "zero1", **PIPELINE}),
    "pipeline of 4": ((4,), {**PIPELINE, "parallel.pipeline": 4}),
    "a server": ((2, 4), {**SERVER, "parameter_server.servers": 1}),
    "two servers": ((4,), {**SERVER, "parameter_server.servers": 2}),
    "servers that work": ((2,), {**SERVER, "parameter_server.placement": "colocated"}),
}
TRAININGS = [(name, ranks) for name, (sizes, _) in LAYOUTS.items() for ranks in sizes]


def write_text(path: Path, rng: np.random.Generator) -> Path:
    """Write a text of words that repeat, which a model learns a little of in a few steps."""
    words = ["".join(rng.choice(list("abcdefgh"), 4)) for _ in range(30)]
    path.write_text(" ".join(rng.choice(words, 1000)))
    return path


class Trained:
    """What one rank has after all steps: the losses, the validation loss, and its share of the state."""

    def __init__(
        self,
        comm: Communicator,
        settings: dict[str, object],
        before_step: Callable[[], None] = lambda: None,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.trainer = assembled(comm, settings)
        trainer, self.losses = self.trainer, []
        with trainer.batches(trainer.recipe.run.steps) as batches:
            for step, batch in enumerate(batches, start=1):
                before_step()
                found = trainer.step(step, trainer.cut(trainer.place(batch)), np.zeros(2))
                after_step()
                self.losses.append(found.loss)
        self.validation = mean_validation_loss(trainer)
        pieces = trainer.exchange.pieces()
        self.state = {(p.kind, p.tensor, p.flat.start): backend.to_host(p.array).copy() for p in pieces}


def _abort(code: int) -> None:
    raise SystemExit(code)


def assembled(
    comm: Communicator,
    settings: dict[str, object],
    resume_from: Path | None = None,
    directory: Path | None = None,
    session: Session | None = None,
) -> Trainer:
    resolved = recipes.load(None, [f"{key}={value}" for key, value in {**SETTINGS, **settings}.items()])
    session = session or Session(comm, locate(comm, None), "threads", _abort)
    return assemble(session, resolved.recipe, resume_from, directory=directory)


def with_pointers(comm: Communicator) -> None:
    """Let messages of ``comm``, and of those made from it later, read and write memory of the device."""
    comm.handover = Handover(device_pointers=True)  # type: ignore[attr-defined]


def check_same(host: list[Trained], device: list[Trained], bound: float, leave_out: Iterable[str] = ()) -> None:
    """The same losses, and state that differs by ``10 * bound`` of its norm, kind by kind.

    Which rank has what of it may differ: stages may be cut by measured seconds.
    """
    for ours, theirs in zip(device, host, strict=True):
        np.testing.assert_allclose(ours.losses, theirs.losses, rtol=bound)
        np.testing.assert_allclose(ours.validation, theirs.validation, rtol=bound)
    got, want = (
        sorted(((key, values) for one in side for key, values in one.state.items()), key=lambda row: row[0])
        for side in (device, host)
    )
    assert [key for key, _ in got] == [key for key, _ in want]
    for kind in {kind for (kind, _, _), _ in want}:
        there, here = (
            np.concatenate(
                [values for (of, tensor, _), values in rows if of == kind and not tensor.endswith(tuple(leave_out))]
            )
            for rows in (got, want)
        )
        assert np.linalg.norm(there - here) <= 10 * bound * np.linalg.norm(here), kind
