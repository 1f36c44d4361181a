"""Values that a search caches for layouts that share them do not change a plan: each plan is also made from scratch."""

import pkgutil
import sys
from dataclasses import replace
from importlib import import_module

import pytest

import hpcdist.planner
from hpcdist.planner import checks
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.layout import (
    ALGORITHMS,
    COMPRESSIONS,
    IMPLEMENTATIONS,
    LIBRARIES,
    RECOMPUTE,
    STRATEGIES,
    ParallelLayout,
)
from hpcdist.planner.memory.device import by_rank, memory
from hpcdist.planner.model.description import TransformerShape
from hpcdist.planner.model.transformer import describe
from hpcdist.planner.plan import plan

MODELS = (
    describe(TransformerShape(layers=16, hidden=1024, heads=16, vocabulary=50_000, context=512), "dense"),
    describe(
        TransformerShape(layers=8, hidden=512, heads=8, vocabulary=8000, context=256, experts=8, experts_per_token=2),
        "experts",
    ),
)
CHOICES = {
    "data": (1, 2, 4, 8),
    "pipeline": (1, 2, 4),
    "tensor": (1, 2, 4),
    "context": (1, 2),
    "expert": (1, 2),
    "strategy": STRATEGIES,
    "servers": (0, 2),
    "microbatch": (1, 2, 4),
    "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1"),
    "chunks": (1, 2),
    "recompute": RECOMPUTE,
    "sequence_parallel": (False, True),
    "precision": ("float32", "bfloat16"),
    "main_gradients": ("float32", "working"),
    "activations": ("float32", "working"),
    "optimizer_slots": (0, 1, 2),
    "compression": COMPRESSIONS,
    "algorithm": ALGORITHMS,
    "implementation": IMPLEMENTATIONS,
    "library": LIBRARIES,
    "overlap": (0.0, 1.0),
    "tensor_overlap": (0.0, 1.0),
    "gradient_fusion": (False, True),
}


def walk(rng, cluster, many):
    """Yield models, possible layouts that differ in one or two fields from the previous layout, and batches."""
    layout, result = ParallelLayout(data=2, implementation="megatron-2022"), 0
    assert set(CHOICES) == set(vars(layout))
    while result < many:
        names = rng.choice(sorted(CHOICES), size=rng.integers(1, 3), replace=False)
        new = replace(layout, **{str(name): CHOICES[name][rng.integers(len(CHOICES[name]))] for name in names})
        if (new.schedule == "interleaved") != (new.chunks > 1):
            continue
        model, batch = int(rng.integers(len(MODELS))), int(rng.choice([32, 64, 96]))
        if next(checks.shape_problems(MODELS[model], new, cluster, batch), None) is None:
            layout = new
            result += 1
            yield model, new, batch


def clear_caches():
    """Clear all caches of the planner."""
    for module in pkgutil.walk_packages(hpcdist.planner.__path__, "hpcdist.planner."):
        import_module(module.name)
    for name, module in sorted(sys.modules.items()):
        if name.startswith(("hpcdist.planner.", "hpcdist.strategies.", "hpcdist.models.")):
            for one in vars(module).values():
                if hasattr(one, "cache_clear"):
                    one.cache_clear()


def figures(result):
    return {
        **{f"memory {name}": value for name, value in result.memory.terms.items()},
        **{f"time {name}": value for name, value in result.timing.terms.items()},
        **{f"bytes {name}": value for name, value in result.timing.bytes.items()},
        "joules": result.energy.joules,
        "hidden": result.timing.hidden_s,
        "flags": result.flags,
    }


@pytest.mark.full
def test_plan_does_not_depend_on_earlier_plans(rng):
    cluster = toml_file.read("a100-selene")
    asked = list(walk(rng, cluster, 300))
    warm = [figures(plan(MODELS[model], layout, cluster, batch, 10)) for model, layout, batch in asked]
    assert len({str(one) for one in warm}) > 150, "these layouts do not differ"
    for (model, layout, batch), reference in zip(asked, warm, strict=True):
        clear_caches()
        assert figures(plan(MODELS[model], layout, replace(cluster), batch, 10)) == reference, layout


def test_memory_cache_distinguishes_all_relevant_fields(rng):
    """Cached values are identified by some fields of a layout. The terms of each rank use all fields."""
    cluster = toml_file.read("a100-selene")
    for model, layout, batch in walk(rng, cluster, 400):
        needed = sum(memory(MODELS[model], layout, cluster, batch).terms.values()) - cluster.device.reserved_bytes
        fullest = max(sum(terms.values()) for terms in by_rank(MODELS[model], layout, cluster, batch))
        if layout.servers == 0:  # a server may need more
            assert needed == pytest.approx(fullest, rel=1e-12), layout
