"""Tokens without a loss in packed documents, and the step time, compared with other ways to fill samples.

    python -m benchmarks packing
    python -m benchmarks packing --context 64 8192 --median 200

Documents of random (log-normal) lengths fill samples in four ways: packed by best fit; one document per sample; one
document per sample without its tokens beyond the context ("truncated"); and one text without borders. The first two
divide longer documents. "wasted" is the share of token positions and of dropped tokens that have no loss; "cut" is the
share of documents that span several samples. Seconds are CPU time per target of a small GPT, forward and backward, at
the first context.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from hpcdist import models
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.start import Session
from hpcdist.models.arena import Arena
from hpcdist.models.config import ModelConfig
from hpcdist.reporting.table import aligned
from hpcdist.training.data.packed import PackedSamples
from hpcdist.training.data.samples import Batch, TokenWindows

SCHEMA, COMMITTED = "hpcdist.benchmark.packing", "training/2026-11-27-packing.h5"
SMALL = {"rounds": 5}
WORSE: Final = 1.5
NAMES: Final = ("packed", "one document", "truncated", "no borders")
OPTIONS: Final = {
    "context": [128, 512, 2048],
    "documents": 20000,
    "median": 60,
    "spread": 0.8,
    "tokens": 4096,
    "layers": 2,
    "hidden": 128,
    "heads": 4,
    "rounds": 15,
}


def drawn(chosen: argparse.Namespace) -> np.ndarray:
    sizes = np.random.default_rng(1).lognormal(np.log(chosen.median), chosen.spread, chosen.documents)
    return np.maximum(2, sizes.round().astype(np.int64))


def wasted(sizes: np.ndarray, context: int, packed: PackedSamples) -> tuple[list[float], list[float]]:
    """Return the share of positions without a loss, and of divided documents, for all ways to fill samples."""
    targets = sizes - 1  # all tokens of a document except the first are predicted
    parts = -(-targets // context)
    held = np.minimum(targets, context)
    used = [1 - packed.padding, targets.sum() / (parts.sum() * context)]
    used += [held.sum() / (len(sizes) * context + (targets - held).sum()), 1 - len(sizes) / sizes.sum()]
    longer = float((targets > context).mean())
    ends = np.cumsum(sizes)
    across = float(((ends - sizes) // context != (ends - 1) // context).mean())
    return [1 - float(share) for share in used], [longer, longer, longer, across]


def step_of(batch: Batch, chosen: argparse.Namespace, targets: int) -> Callable[[], float]:
    """Return a function that runs forward and backward of a batch, and returns the CPU seconds per target."""
    config = ModelConfig(layers=chosen.layers, hidden=chosen.hidden, heads=chosen.heads)
    model = models.build(config, context=chosen.context[0])
    store, gradient = FlatStore(model.layout, model.dtype), FlatStore(model.layout, model.dtype)
    model.initialise(store, 1)
    parameters, into, arena = model.bind(store), model.bind_gradients(gradient), Arena()

    def run() -> float:
        begin = time.process_time()
        for stage in into:
            stage.begin_step()
        logits = model.forward(parameters, batch[0], arena)
        model.loss.forward(logits, batch[1], model.operations, arena.saved(model.stages[-1].layer))
        model.backward(parameters, into, 1 / targets, arena)
        return (time.process_time() - begin) / targets

    return run


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    sizes = drawn(chosen)
    text, ends = np.random.default_rng(2).integers(0, 256, sizes.sum()).astype(np.uint8), np.cumsum(sizes)
    shares, packed = [], []
    for context in chosen.context:
        begin = time.perf_counter()
        packed.append(PackedSamples(text, 0, ends, context, predicting=True, cut=True))
        shares.append([*wasted(sizes, context, packed[-1]), [time.perf_counter() - begin] * len(NAMES)])
    context = chosen.context[0]
    count = max(1, chosen.tokens // context)
    sampled = np.random.default_rng(3).permutation(packed[0].count)[:count]
    first = np.random.default_rng(4).permutation(np.flatnonzero(sizes <= context))[:count]
    windows = np.concatenate([text[ends[document] - sizes[document] : ends[document]] for document in first])
    alone = PackedSamples(windows, 0, np.cumsum(sizes[first]), context, predicting=True, cut=False)
    single = [alone.take(np.arange(alone.count), 0), TokenWindows(text, context, shifting=False).take(sampled, 0)]
    separate = _apart(single[0], context)
    contenders = {
        "packed": step_of(packed[0].take(sampled, 0), chosen, packed[0].targets(sampled)),
        "one document": step_of(separate, chosen, int((separate[1] >= 0).sum())),
        "no borders": step_of(single[1], chosen, count * context),
    }
    values = harness.alternate(contenders, chosen.rounds)
    arrays = {"shares": np.array(shares), "context": np.array(chosen.context), "time_s": np.array([*values.values()])}
    about = {"contenders": ";".join(values), "ways": ";".join(NAMES)}
    dims = {"shares": "context, (wasted, cut, seconds of packing), ways", "context": "context"}
    return Results(arrays, dims | {"time_s": "contenders, rounds"}, about)


def _apart(batch: Batch, context: int) -> Batch:
    tokens, positions, _ = batch[0].arrays  # type: ignore[attr-defined]
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    for row, start in zip(*np.nonzero((positions == 0) & (batch[1] >= 0)), strict=True):
        ends = np.flatnonzero(positions[row, start + 1 :] == 0)
        stop = start + 1 + int(ends[0]) if ends.size else context
        x, y = np.zeros(context, tokens.dtype), np.full(context, -1)
        x[: stop - start], y[: stop - start] = tokens[row, start:stop], batch[1][row, start:stop]
        rows.append((x, y))
    return np.array([x for x, _ in rows]), np.array([y for _, y in rows])


def ratios(results: Results) -> harness.Ratios:
    """Return the waste of packing relative to one document per sample, and times relative to a text without borders."""
    packed, one, *_ = results.arrays["shares"][:, 0].T
    contexts = results.arrays["context"].tolist()
    times = harness.over_base(results.arrays["time_s"], results.names("contenders"), base=2)
    wastes = {f"context {size}, waste": np.array([a / b]) for size, a, b in zip(contexts, packed, one, strict=True)}
    return wastes | {f"{name}, seconds": ratio for name, ratio in times.items()}


def lines(results: Results) -> Sequence[str]:
    rows = [["context", *(f"{way}: wasted" for way in NAMES), *(f"{way}: cut" for way in NAMES), "packed in s"]]
    for size, (waste, cut, seconds) in zip(results.arrays["context"].tolist(), results.arrays["shares"], strict=True):
        rows.append([str(size), *(f"{share:.1%}" for share in (*waste, *cut)), f"{seconds[0]:.2f}"])
    times = harness.time_table(results.arrays["time_s"], results.names("contenders"), 2, unit="us a target", scale=1e6)
    return [*aligned(rows), "", *times]
