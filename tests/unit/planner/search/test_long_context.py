"""Searches with samples too long for one device: the context is split, and proposed layouts run as planned."""

from dataclasses import replace

import pytest

from harness.made_plans import CLUSTER
from harness.trainings import losses, recipe_keys, trainer_of
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.models.config import ModelConfig
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model.transformer import describe, named, of_config
from hpcdist.planner.search.best_layouts import search
from hpcdist.planner.search.space import SearchSpec

RANKS, TOKENS, BATCH = 4, 512, 2
MODEL = ModelConfig(layers=6, hidden=64, heads=4, vocabulary=256)
OURS = ParallelLayout(implementation="hpcdist", precision="float32", algorithm="ring", overlap=0.0)


def layouts(model, on, devices, batch, **asked):
    """Return the estimates of the best grids that this version can run."""
    spec = SearchSpec(headroom=0.0, runnable=True, distinct=True, simulate=False, **asked)
    return [one.estimate for one in search(model, on, devices, batch, spec).found]


@pytest.mark.full
def test_search_for_128k_tokens_uses_context_ranks():
    """An 8B model on 64 H100 needs no context ranks for 4K tokens.

    For 128K tokens the best grids all have context ranks.
    """
    shape, on = named("llama-3-8b"), toml_file.read("h100-hgx")
    base = replace(OURS, precision="bfloat16", activations="working", algorithm="auto")

    def degrees(context, batch):
        model = describe(replace(shape, context=context), "8b")
        return [one.layout.context for one in layouts(model, on, 64, batch, base=base, first=3, recompute=("none",))]

    assert degrees(4096, 128)[0] == 1
    long = degrees(131_072, 4)
    assert len(long) == 3 and min(long) > 1


@pytest.mark.full
def test_best_long_context_layouts_run_with_the_planned_bytes():
    """The samples fit on no single device. Sent bytes of the best grids match the plan to 0.1 %, memory to 5 %."""
    card = CLUSTER.device
    device = replace(
        card, peak_flops={"float32": 1e12}, matmul={"float32": card.matmul["bfloat16"]}, reserved_bytes=0.0
    )
    on, model = replace(CLUSTER, device=device), of_config(MODEL, context=TOKENS)
    alone = layouts(model, on, 1, BATCH, base=OURS, first=1, recompute=("none",))[0]
    memory_bytes = 0.4 * alone.memory.bytes
    first = layouts(model, on, RANKS, BATCH, base=OURS, first=3, memory_bytes=memory_bytes, contexts=(2, 4))
    assert len(first) == 3
    for planned in first:
        layout = planned.layout
        keys = recipe_keys(
            f"layers=6 hidden=64 heads=4 vocabulary=256 data.context={TOKENS} global_batch={BATCH} steps=2 "
            f"optimizer.name=adamw algorithm=ring strategy={layout.strategy} parallel.data={layout.data} "
            f"pipeline={layout.pipeline} tensor={layout.tensor} parallel.context={layout.context} "
            f"microbatches={layout.microbatches(BATCH)} recompute={str(layout.recompute == 'full').lower()} "
            f"sequence_parallel={str(layout.sequence_parallel).lower()}"
        )
        if layout.pipeline > 1:
            keys |= recipe_keys(f"schedule={layout.schedule} chunks={layout.chunks}")

        def body(comm, keys=keys):
            trainer = trainer_of(comm, keys)
            losses(trainer, 1)
            with count_traffic(comm) as traffic:
                losses(trainer, 2, 1)
            return traffic.sent_bytes, trainer.ledger.peak_total

        sent, held = (max(row) for row in zip(*run_threads(RANKS, body), strict=True))
        assert sent == pytest.approx(sum(planned.timing.bytes.values()), rel=1e-3), layout
        assert held == pytest.approx(planned.memory.bytes, rel=0.05), layout
        assert held <= memory_bytes
