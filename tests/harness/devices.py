"""Models and optimizers on the CPU and on a GPU, real or double, and the transfers of a training.


Every class and function takes the device, "cpu" or "gpu", and works with any cupy. A step copies to the host the losses
of the batch, all at once, a norm, and the messages that are staged. Between two messages nobody waits.
"""

import threading
from collections import Counter
from itertools import pairwise
from types import ModuleType

import numpy as np

from harness.inputs import model_case
from harness.trainings import Trained
from hpcdist import models
from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.ranges import split as split_range
from hpcdist.arrays.store import FlatStore
from hpcdist.models import split_backward
from hpcdist.models.arena import Arena
from hpcdist.models.stage import IGNORED, Draw
from hpcdist.models.transformer import masked_predictions
from hpcdist.optim import optimizer
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.core.operations import Kind
from hpcdist.strategies.schedule.step import phase_of

Batches = list[tuple[np.ndarray, np.ndarray]]

LLAMA = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "kv_heads": 2, "bias": False}
GPT = {"layers": 2, "hidden": 12, "heads": 3, "vocabulary": 11}
MODELS = {
    "gpt": model_case(**GPT, context=7),
    "gpt tied": model_case(**GPT, tied=True, context=7),
    "gpt, more than one block of queries": model_case(**GPT, context=70),
    "gpt with a window": model_case(**GPT, window=20, context=150),
    "gpt tied, dropout": model_case(**GPT, tied=True, dropout=0.2, context=70),
    "gpt with the options of Llama": model_case(**LLAMA, layers=2, hidden=16, heads=4, vocabulary=11, context=70),
    "encoder": model_case(kind="encoder", **GPT, context=9),
    "encoder with the options of Llama": model_case(
        kind="encoder", **LLAMA, layers=1, hidden=16, heads=4, vocabulary=11, context=9
    ),
    "gpt of experts": model_case(
        **GPT, experts=5, capacity_factor=0.8, shared_experts=1, balance_loss=0.2, z_loss=0.1, context=40
    ),
    "encoder of experts with the options of Llama": model_case(
        kind="encoder",
        **LLAMA,
        layers=1,
        hidden=16,
        heads=4,
        vocabulary=11,
        context=9,
        experts=6,
        experts_per_token=3,
        router="sigmoid",
        balance_loss=0.2,
    ),
    "convnet, bytes": model_case(
        kind="convnet", layers=3, hidden=4, activation="relu", height=5, width=6, channels=3, classes=4
    ),
    "convnet rms, dropout": model_case(
        kind="convnet", layers=3, hidden=4, norm="rms", dropout=0.3, height=4, width=1, channels=2, classes=3
    ),
    "mlp gelu": model_case(kind="mlp", layers=2, hidden=9, features=5, classes=4),
    "mlp relu, bytes": model_case(kind="mlp", layers=1, hidden=9, activation="relu", features=5, classes=4),
    "mlp, dropout": model_case(kind="mlp", layers=2, hidden=9, dropout=0.4, features=5, classes=4),
}
MICROBATCHES = 2


def batches_of(case: str, rng: np.random.Generator) -> Batches:
    config, inputs = MODELS[case]
    results = []
    for samples in range(3, 3 + MICROBATCHES):
        if config.kind == "gpt":
            tokens = rng.integers(0, config.vocabulary, (samples, inputs["context"] + 1)).astype(np.uint8)
            results.append((tokens[:, :-1].copy(), tokens[:, 1:].copy()))
        elif config.kind == "encoder":
            tokens = rng.integers(0, config.vocabulary, (samples, inputs["context"])).astype(np.uint8)
            targets = np.full(tokens.shape, IGNORED)
            targets[:, 2 : 2 + masked_predictions(inputs["context"])] = 5
            results.append((tokens, targets))
        else:
            features = inputs.get(
                "features", inputs.get("height", 1) * inputs.get("width", 1) * inputs.get("channels", 1)
            )
            x = rng.integers(0, 256, (samples, features)).astype(np.uint8)
            results.append((x if "bytes" in case else x / 64 - 2, rng.integers(0, inputs["classes"], samples)))
    return results


def place_batches(batches: Batches, on: str) -> Batches:
    return [(backend.place(x, on), backend.place(targets, on)) for x, targets in batches]


def crossings(gpu: ModuleType, case: str, *, backward: bool = True) -> Counter[tuple[str, str]]:
    """Return the transfers of a step's micro-batches, or of one evaluation.

    A layer of experts waits once, for counts.
    """
    config, _ = MODELS[case]
    layers = config.layers * (MICROBATCHES if backward else 1)
    sites = {(gpu.H2D, "mixture._route"): layers, (gpu.D2H, "router.count"): layers, (gpu.H2D, "router.place"): layers}
    sites |= {(gpu.H2D, "router.bias_of"): 1, (gpu.H2D, "router.gradient_of_logits"): layers * backward}
    return +Counter(sites if config.experts else {})


class ModelRun:
    """A model on ``on``. Its parameters are larger than initial values, so that every path has an effect."""

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
        """Return the dropout of a micro-batch."""
        return Draw(self.seed, self.number, first_sample)

    def step(self, batches: Batches) -> list[backend.Scalar]:
        """Return the loss of each micro-batch on its device. The gradient is left in its store."""
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
        """Run the backward of `step` in two passes: the second at the end for all micro-batches, or ``together``.


        Unused memory is overwritten in between.
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
                saved.scale = 0.25
                d = stage.backward(views, into, d, two_passes, saved)
                saved.narrow()
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


def random_store(rng: np.random.Generator, dtype: str) -> FlatStore:
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
        """Return the weights and every slot."""
        return [self.master, *(slot for rule in self.optimizers for slot in rule.slots.values())]


BOTH_WAYS = ("broadcast", "allreduce", "reduce_scatter", "all_gather")
TO_HOST = ("send", "isend", "sendrecv", "all_to_all", *BOTH_WAYS)
TO_DEVICE = ("recv", "irecv", "sendrecv", "all_to_all", *BOTH_WAYS)

STAGED, INSIDE = "a staged allreduce", 1


class Watch:
    """Counts the messages (parameters, gradients, activations) and the transfers of each step on one rank."""

    def __init__(self, gpu: ModuleType, pointers: bool) -> None:
        self._gpu, self._pointers, self._name = gpu, pointers, threading.current_thread().name
        self._messages: Counter[str] = Counter()
        self._staged = False  # inside an allreduce that brings its buffer to the host as a whole
        self.steps: list[tuple[Counter[tuple[str, str]], Counter[str]]] = []

    def begin(self, comm: str, op: str, dtype: str, count: int, sent_bytes: int, peer: int, tag: int) -> int:
        if dtype == "float32" and op.endswith("_allreduce") and not self._pointers:
            self._messages[STAGED] += 1
            self._staged = True
            return INSIDE
        if (
            dtype == "float32" and op in (*TO_HOST, *TO_DEVICE) and not self._staged
        ):  # what ranks agree on is float64, on the host
            self._messages[op] += 1
            assert not (self._pointers and self._gpu.LOG.kernels_pending()), f"{op} begins while kernels write"
        return 0

    def end(self, token: int) -> None:
        if token == INSIDE:
            self._staged = False

    def before_step(self) -> None:
        self._messages.clear()
        self._before = self._gpu.LOG.sites(self._name)

    def after_step(self) -> None:
        self.steps.append((self._gpu.LOG.sites(self._name) - self._before, Counter(self._messages)))


def expected_sites(gpu: ModuleType, run: Trained, messages: Counter[str], pointers: bool) -> Counter[tuple[str, str]]:
    """Return the expected transfers and waits of a step of one rank, by call site."""
    trainer = run.trainer
    samples = len(range(trainer.recipe.run.global_batch)[trainer.data_axis.rank :: trainer.data_axis.size])
    last, context = len(trainer.model.stages) - 1, trainer.context
    normed = any(op.kind is Kind.APPLY for op in trainer.operations) and context.parts  # be they counted or watched
    forwards = [op for op in trainer.operations if op.kind is Kind.FORWARD and op.unit == last]
    normalised = sum(op.kind is Kind.NORMS for op in trainer.operations)
    phases = [phase_of(op.kind) for op in trainer.operations]
    to_host = sum(messages[op] for op in TO_HOST)
    to_device = sum(messages[op] for op in TO_DEVICE)
    both = sum(messages[op] for op in BOTH_WAYS)
    return Counter(
        {
            (gpu.H2D, "source.place"): 2,
            (gpu.D2H, "stages.losses"): int(any(op.microbatch < samples for op in forwards)),
            (gpu.D2H, "norms.sum_of_squares"): int(bool(normed)),
            (gpu.D2H, "base.partial_norms"): normalised,
            (gpu.H2D, "base._rates_on_gpu"): normalised,
            (gpu.D2H, "handover.outgoing"): 0 if pointers else to_host - both,
            (gpu.D2H, "handover.both"): 0 if pointers else both,
            (gpu.H2D, "handover.<lambda>"): 0 if pointers else to_device,
            (gpu.SYNCHRONISE, "handover.outgoing"): to_host - both,
            (gpu.SYNCHRONISE, "handover.incoming"): to_device if pointers else 0,
            (gpu.SYNCHRONISE, "handover.both"): 0 if pointers else both,
            (gpu.D2H, "dispatch._fill"): messages[STAGED],
            (gpu.SYNCHRONISE, "dispatch.staged_allreduce"): messages[STAGED],
            (gpu.H2D, "dispatch.staged_allreduce"): messages[STAGED],
            (gpu.SYNCHRONISE, "step.done"): 1 + sum(a != b for a, b in pairwise(phases)),
        }
    )
