"""The search finds the best of all layouts, counts the rejected layouts, and gives reasons."""

import gc
import random
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import product

import pytest

from harness.made_plans import problems
from harness.marks import cases
from hpcdist.errors import UsageError
from hpcdist.planner import checks
from hpcdist.planner.checks import unsupported
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.memory.device import by_rank, memory
from hpcdist.planner.model.description import TransformerShape
from hpcdist.planner.model.transformer import describe
from hpcdist.planner.plan import plan
from hpcdist.planner.search import space
from hpcdist.planner.search.best_layouts import search
from hpcdist.planner.search.space import SearchSpec
from hpcdist.planner.time.pipeline import border_message
from hpcdist.planner.time.step import microbatch_flow
from hpcdist.strategies.schedule.registry import SCHEDULES

DEVICES, BATCH, STEPS = 8, 12, 100
MODEL = describe(TransformerShape(layers=4, hidden=1024, heads=4, vocabulary=16384, context=256, dropout=0.1), "small")
BASE = ParallelLayout(implementation="megatron-2022")


@lru_cache
def cluster(memory_bytes, best_mfu=0.0):
    """Return two nodes of four A100 with ``memory_bytes`` each, and an optional MFU limit."""
    reference = toml_file.read("a100-selene")
    node = replace(reference.node, devices=4)
    levels = (replace(reference.levels[0], devices=4), *reference.levels[1:])
    site = replace(reference.site, device_hour_price=2.0, kwh_price=0.2, currency="EUR")
    device = replace(reference.device, memory_bytes=memory_bytes, reserved_bytes=0.0, best_mfu=best_mfu)
    return replace(reference, devices=DEVICES, node=node, levels=levels, device=device, site=site)


def run_search(on, **expected):
    """Search on a cluster without reserved memory, by default without a simulation."""
    return search(
        MODEL, on, DEVICES, BATCH, SearchSpec(**{"headroom": 0.0, "base": BASE, "simulate": False, **expected})
    )


def every_value(base):
    """Yield every value of every degree and option, valid or not."""
    degrees = [one for one in range(1, DEVICES + 1) if DEVICES % one == 0]
    for data, pipeline, tensor, context in product(degrees, repeat=4):
        if data * pipeline * tensor * context != DEVICES:
            continue
        for schedule, chunks, microbatch, recompute, strategy, parallel in product(
            SCHEDULES,
            (1, 2, 4),
            range(1, BATCH + 1),
            ("none", "selective", "full"),
            ("allreduce", "zero1", "zero2", "zero3"),
            (False, True),
        ):
            many = -(-BATCH // (data * microbatch))
            # Micro-batches are as even as can be; without a pipeline they come one after the other in any order.
            if microbatch == -(-BATCH // (data * many)) and (pipeline > 1 or schedule == "1f1b"):
                yield replace(
                    base,
                    data=data,
                    pipeline=pipeline,
                    tensor=tensor,
                    context=context,
                    schedule=schedule,
                    chunks=chunks,
                    microbatch=microbatch,
                    recompute=recompute,
                    strategy=strategy,
                    sequence_parallel=parallel,
                )


@lru_cache
def possible_estimates(implementation, memory_bytes):
    """Return the estimates of all possible layouts by brute force."""
    on, base = cluster(memory_bytes), replace(BASE, implementation=implementation)
    return tuple(
        plan(MODEL, layout, on, BATCH, STEPS) for layout in every_value(base) if not problems(MODEL, layout, on, BATCH)
    )


def relevant_fields(estimate):
    """Return the fields of a layout that make a difference. A search omits options that make none."""
    layout = estimate.layout
    one = layout.data * layout.context == 1
    same = layout.implementation != "megatron-2022" and layout.recompute == "selective"  # attention is fused
    return (
        *(layout.data, layout.pipeline, layout.tensor, layout.context, layout.microbatches(BATCH)),
        *(layout.schedule, layout.chunks, layout.sequence_parallel),
        "none" if same else layout.recompute,
        "" if one else layout.strategy,
    )


@pytest.mark.parametrize("implementation", ["megatron-2022", "hpcdist"])
@pytest.mark.parametrize("memory_bytes", [0.3e9, 40e9], ids=["tight", "roomy"])
@pytest.mark.parametrize("objective", space.OBJECTIVES)
@pytest.mark.full
def test_search_equals_brute_force(implementation, memory_bytes, objective):
    """The ten best values of all layouts are found, each distinct option once."""
    best = {}
    for estimate in possible_estimates(implementation, memory_bytes):
        actual = space.value(estimate, objective)
        best[relevant_fields(estimate)] = min(actual, best.get(relevant_fields(estimate), actual))
    base = replace(BASE, implementation=implementation)
    result = run_search(cluster(memory_bytes), objective=objective, steps=STEPS, base=base, chunks=(2, 4))
    assert len(best) > 10
    assert [one.value for one in result.found] == pytest.approx(sorted(best.values())[:10], rel=1e-12)
    assert result.estimated < len(best), "it looked at everything"
    refused = sum(one.count for one in result.refused if one.of == "layouts")
    assert result.layouts == result.estimated + refused + result.left_out
    assert result.left_out >= 0


@pytest.mark.parametrize("implementation", ["hpcdist"])
@pytest.mark.parametrize("objective", space.OBJECTIVES)
@pytest.mark.full
def test_mfu_limit_loses_no_layout(implementation, objective):
    """Most of the best layouts are at the limit, and equal, so the formulas order them.

    The limit is for programs without published steps on the device.
    """
    mfus = sorted(estimate.mfu for estimate in possible_estimates(implementation, 40e9))
    on = cluster(40e9, 0.9999 * mfus[-len(mfus) // 50])
    best = {}
    for estimate in possible_estimates(implementation, 40e9):
        limited = plan(MODEL, estimate.layout, on, BATCH, STEPS)
        assert limited.is_capped == (estimate.mfu > on.most_mfu)
        actual = space.value_and_tie_break(limited, objective)
        assert actual[0] >= space.value(estimate, objective)
        best[relevant_fields(estimate)] = min(actual, best.get(relevant_fields(estimate), actual))
    base = replace(BASE, implementation=implementation)
    result = run_search(on, objective=objective, steps=STEPS, base=base, chunks=(2, 4))
    lines = [space.value_and_tie_break(one.estimate, objective) for one in result.found]
    assert lines == [pytest.approx(pair, rel=1e-12) for pair in sorted(best.values())[:10]]
    assert result.found[0].estimate.is_capped or objective != "time"
    assert result.estimated < len(best), "it looked at everything"


@pytest.mark.parametrize("implementation", ["megatron-2022", "hpcdist"])
@pytest.mark.parametrize("objective", space.OBJECTIVES)
@pytest.mark.full_except("time-megatron")
def test_no_layout_is_below_the_bounds_of_its_family_and_order(implementation, objective):
    on, orders = cluster(40e9), {}
    for estimate in possible_estimates(implementation, 40e9):
        layout, value = estimate.layout, space.value(estimate, objective)
        order = replace(layout, strategy="allreduce")
        if order not in orders:
            orders[order] = floors(MODEL, order, on, BATCH, objective)
        assert max(orders[order]) <= value * (1 + 1e-12), layout
    assert len(orders) > 50


def floors(model, order, on, batch, objective):
    """Return the bounds of an order: by its family, by its schedule, and by its micro-batches."""
    totals = space.family_totals(model, order, on, batch)
    hop_s = border_message(model, order, on).seconds
    return (
        space.family_bound(totals, order, on, objective),
        space.schedule_bound(totals, order, hop_s, on, objective),
        space.order_bound(microbatch_flow(model, order, on, batch), model, order, on, batch, objective),
    )


def random_layouts(implementation, draw, many):
    """Yield random layouts of random models on random clusters.


    Pipelines have batches that may not fill the last micro-batch. Models are shallow, and some have large vocabularies,
    so that ranks usually differ.
    """
    result = 0
    while result < many:
        shape = TransformerShape(
            layers=draw.choice([4, 6, 8, 12, 16, 24]),
            hidden=draw.choice([256, 1024, 4096]),
            heads=16,
            vocabulary=draw.choice([1000, 50_000, 250_000]),
            context=draw.choice([64, 512, 2048]),
        )
        reference = toml_file.read(draw.choice(["a100-selene", "h100-hgx", "mi250x-frontier"]))
        pipeline = draw.choice([2, 3, 4, 6, 8])
        recompute = draw.choice(["none", "selective", "full"])
        spec = SearchSpec(base=replace(BASE, implementation=implementation))
        grid = replace(
            spec.base,
            data=draw.choice([1, 2, 4, 6]),
            pipeline=pipeline,
            tensor=draw.choice([1, 1, 2, 4, 16]),
            context=draw.choice([1, 1, 2]),
            microbatch=draw.choice([1, 1, 2, 3, 4]),
            recompute=recompute,
            tensor_overlap=draw.choice([0.0, 1.0]),
        )
        grid = replace(grid, sequence_parallel=grid.tensor > 1 and draw.random() < 0.5)
        batch = grid.data * draw.randint(1, 40)
        model = describe(shape, "drawn")
        schedule, chunks = draw.choice(space.orders(model, grid, spec))
        layout = replace(grid, schedule=schedule, chunks=chunks, strategy=draw.choice(spec.strategies))
        site = replace(reference.site, device_hour_price=2.0, kwh_price=0.2, currency="EUR")
        reference = replace(reference, devices=max(reference.devices, layout.devices), site=site)
        if next(checks.shape_problems(model, layout, reference, batch), None) is None:
            result += 1
            yield model, layout, reference, batch


@pytest.mark.parametrize("implementation", ["megatron-2022", "hpcdist"])
@pytest.mark.full
def test_no_random_layout_is_below_its_bounds(implementation, rng):
    near = {"family": [], "schedule": [], "order": []}
    draw = random.Random(int(rng.integers(1 << 62)))
    for model, layout, on, batch in random_layouts(implementation, draw, 150):
        estimate = plan(model, layout, on, batch, STEPS)
        for objective in space.OBJECTIVES:
            value = space.value(estimate, objective)
            for name, floor in zip(near, floors(model, layout, on, batch, objective), strict=True):
                assert floor <= value * (1 + 1e-12), (name, objective, layout, model.shape, on.name, batch)
                near[name].append(floor / value)
    shares = {name: sum(result) / len(result) for name, result in near.items()}
    assert shares["schedule"] > shares["family"] + 0.02, "a schedule says nothing"
    assert shares["order"] > 0.5


def deep_search(context=1024):
    """Return a search over pipelines with large bubbles and very different exchanges."""
    shape = TransformerShape(layers=32, hidden=4096, heads=16, vocabulary=1000, context=context)
    spec = SearchSpec(
        base=BASE,
        compressions=("none", "int8", "powersgd", "onebit"),
        contexts=(1,),
        schedules=("1f1b",),
        recompute=("none",),
        first=1,
        simulate=False,
    )
    return describe(shape, "deep"), toml_file.read("mi250x-frontier"), spec


@pytest.mark.parametrize("objective", ["energy", "energy-delay"])
def test_order_bounds_lose_no_pipeline_with_large_bubbles(objective, monkeypatch):
    model, on, expected = deep_search()
    expected = replace(expected, objective=objective)
    bounded = search(model, on, 2048, 16, expected)
    monkeypatch.setattr(space, "schedule_bound", lambda *_: 0.0)
    monkeypatch.setattr(space, "order_bound", lambda *_: 0.0)
    unbounded = search(model, on, 2048, 16, expected)
    assert [one.value for one in bounded.found] == pytest.approx([one.value for one in unbounded.found], rel=1e-12)
    assert 2 * bounded.estimated < unbounded.estimated


@pytest.mark.parametrize("implementation", ["megatron-2022", "hpcdist"])
@pytest.mark.parametrize("objective", space.OBJECTIVES)
@pytest.mark.parametrize(("pipeline", "tensor", "sequence_parallel"), [(1, 8, True), (8, 1, False), (32, 4, True)])
def test_every_option_is_above_the_bound_of_its_order(implementation, objective, pipeline, tensor, sequence_parallel):
    model, on, expected = deep_search(256)
    on = replace(on, site=replace(on.site, device_hour_price=2.0, kwh_price=0.2, currency="EUR"))
    order = replace(
        BASE,
        implementation=implementation,
        data=2048 // (pipeline * tensor),
        pipeline=pipeline,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
    )
    expected = replace(expected, strategies=("allreduce", "zero1", "zero2", "zero3", "parameter_server"))
    batch = 2 * order.data  # so a pipeline waits for most of a step
    results = [
        plan(model, space.with_strategy(order, way), on, batch, STEPS) for way in space.strategies(order, expected)
    ]
    values = [space.value(one, objective) for one in results]
    reference = microbatch_flow(model, order, on, batch)
    bound = space.order_bound(reference, model, order, on, batch, objective)
    assert bound <= min(values) * (1 + 1e-12)
    assert bound > 0.3 * min(values), "a bound that says nothing"
    way = space.strategies(order, expected)[-1]
    layout = space.with_strategy(order, way)
    assert plan(model, layout, on, batch, STEPS, flow=reference) == plan(model, layout, on, batch, STEPS)
    assert len(set(values)) > 5


@pytest.mark.full
def test_memory_grows_with_the_micro_batch_for_any_strategy():
    """The search relies on these properties."""
    sizes = {}
    alive = {}
    for estimate in (*possible_estimates("megatron-2022", 40e9), *possible_estimates("hpcdist", 40e9)):
        layout, many = estimate.layout, estimate.layout.microbatches(BATCH)
        is_even = BATCH % (layout.data * layout.microbatch) == 0
        if many > 1 and is_even and (layout.schedule != "interleaved" or many % layout.pipeline == 0):
            needed = memory(MODEL, layout, cluster(40e9), BATCH)  # with buckets as they are by default
            sizes.setdefault(replace(layout, microbatch=1), {})[layout.microbatch] = needed.bytes
        kept = tuple(terms["activations"] for terms in by_rank(MODEL, layout, cluster(40e9), BATCH))
        alive.setdefault(replace(layout, strategy="allreduce"), set()).add(kept)
    assert any(len(one) > 2 for one in sizes.values())
    for one in sizes.values():
        assert [one[size] for size in sorted(one)] == sorted(one.values())
    assert len(alive) > 500
    assert all(len(one) == 1 for one in alive.values())


@pytest.mark.parametrize("implementation", ["megatron-2022", "hpcdist"])
@pytest.mark.parametrize(("batch", "size", "others"), [(16, 4, (3,)), (16, 8, (5, 7))])
def test_micro_batch_sizes_do_not_affect_each_other(implementation, batch, size, others):
    """An impossible or uneven micro-batch size does not affect the memory of another size."""
    on = cluster(0.3e9)

    def layouts(*sizes):
        base = replace(BASE, implementation=implementation)
        spec = SearchSpec(headroom=0.0, base=base, microbatches=sizes, first=10_000, simulate=False)
        return {one.estimate.layout for one in search(MODEL, on, DEVICES, batch, spec).found}

    each = [layouts(one) for one in (size, *others)]
    assert len(each[0]) > 10
    assert layouts(size, *others) == set().union(*each)


def test_runnable_option_excludes_unsupported_layouts():
    on, base = cluster(40e9), replace(BASE, implementation="hpcdist", precision="float32")
    on = replace(
        on, device=replace(on.device, peak_flops={"float32": 19.5e12}, matmul={"float32": on.device.matmul["bfloat16"]})
    )
    servers = replace(base, strategy="parameter_server")
    only = {"base": servers, "strategies": ("parameter_server",), "contexts": (2,)}
    free = run_search(on, first=3, **only)
    assert all(one.estimate.layout.context == 2 for one in free.found)
    assert all(any("context" in flag for flag in one.estimate.flags) for one in free.found), "flagged as not built"
    bound = run_search(on, base=base, runnable=True, first=20)
    assert len(bound.found) == 20
    assert all(not unsupported(one.estimate.layout) for one in bound.found)
    mixture = describe(replace(MODEL.shape, experts=8, experts_per_token=2), "mixture")
    axes = {"base": replace(base, overlap=0.0), "contexts": (4,), "experts": (1, 8), "tensors": (1,), "first": 50}
    mixed = search(mixture, on, DEVICES, BATCH, SearchSpec(headroom=0.0, runnable=True, simulate=False, **axes)).found
    assert {8, 1} == {one.estimate.layout.expert for one in mixed}, "8 share them out on data 2 x context 4"
    assert all(one.estimate.layout.context == 4 and not unsupported(one.estimate.layout) for one in mixed)
    with_none = run_search(on, runnable=True, **only)
    assert with_none.found == ()
    assert {one.limit for one in with_none.refused} >= {"unbuilt"}
    assert with_none.nothing


def test_compression_is_tried_only_if_requested():
    on, base = cluster(40e9), replace(BASE, implementation="hpcdist")
    assert {one.estimate.layout.compression for one in run_search(on, base=base).found} == {"none"}
    alone = {"tensors": (1,), "pipelines": (1,), "contexts": (1,)}
    both = run_search(on, base=base, compressions=("none", "int8"), first=100, **alone)
    assert {one.estimate.layout.compression for one in both.found} == {"none", "int8"}
    for one in both.found:
        assert one.estimate.layout.overlap == (0.0 if one.estimate.layout.compression == "int8" else 1.0)


def test_search_may_use_fewer_devices():
    on = cluster(40e9)
    all_of_them, fewer = (run_search(on, objective="energy", fewer=fewer) for fewer in (False, True))
    assert fewer.found[0].value < all_of_them.found[0].value
    assert fewer.found[0].estimate.layout.devices < DEVICES
    assert all(one.estimate.layout.devices == DEVICES for one in all_of_them.found)


def test_distinct_keeps_the_best_of_each_grid():
    result = run_search(cluster(40e9), distinct=True)

    def grid(estimate):
        layout = estimate.layout
        return layout.data, layout.pipeline, layout.tensor, layout.context

    assert len({grid(one.estimate) for one in result.found}) == len(result.found) == 10
    every_best = {}
    for estimate in possible_estimates("megatron-2022", 40e9):
        key = grid(estimate)
        every_best[key] = min(estimate.step_s, every_best.get(key, estimate.step_s))
    assert [one.value for one in result.found] == pytest.approx(sorted(every_best.values())[:10])


def test_best_layouts_are_simulated():
    on = cluster(40e9)
    result = run_search(on, pipelines=(4,), schedules=("1f1b",), first=5, steps=STEPS, simulate=True)
    values = [one.value for one in result.found]
    assert values == sorted(values)
    for one in result.found:
        again = plan(MODEL, one.estimate.layout, on, BATCH, STEPS, simulate=True)
        assert one.value == again.step_s


def test_best_layouts_are_explained_by_terms():
    result = run_search(cluster(40e9), simulate=True)
    assert len(result.found) == 10
    for one, behind in zip(result.found, result.found[1:], strict=False):
        assert any("instead of" in line for line in one.why), one.why
        assert one.value <= behind.value
        assert len(one.limits) == 2
        assert "memory" in one.limits[1]
    assert result.found[-1].why == () or "instead of" in result.found[-1].why[0]


def test_garbage_collection_is_enabled_after_a_search(monkeypatch):
    was_on = []

    def broken(*_):
        was_on.append(gc.isenabled())
        raise RuntimeError("broken")

    run_search(cluster(40e9), first=1)
    assert gc.isenabled()
    monkeypatch.setattr(space, "family_bound", broken)
    with pytest.raises(RuntimeError, match="broken"):
        run_search(cluster(40e9), first=1)
    assert was_on == [False]
    assert gc.isenabled()


def test_rejected_layouts_are_counted_by_reason():
    result = run_search(cluster(0.3e9))
    reasons = {(one.limit, one.of): one for one in result.refused}
    assert reasons["heads", "grids"].count == 1  # of all products of 8, only tensor = 8
    assert (
        "does not divide" in reasons["heads", "grids"].example
        or "more than the 4 heads" in reasons["heads", "grids"].example
    )
    assert reasons["layers", "grids"].count >= 1
    assert reasons["memory", "layouts"].count > 100
    assert "GB too much" in reasons["memory", "layouts"].example


def test_search_without_result_reports_missing_memory_and_advice():
    on = cluster(0.12e9)
    result = run_search(on)
    assert result.found == ()
    assert "missing" in result.nothing[0]
    # The device that would do is the smallest on which anything does.
    least = min(estimate.memory.bytes for estimate in possible_estimates("megatron-2022", 40e9))
    assert not run_search(cluster(least - 1)).found and run_search(cluster(least)).found
    assert any("2 times the devices, as data it would fit" in line for line in result.nothing)
    twice = replace(on, devices=2 * DEVICES)
    assert search(MODEL, twice, 2 * DEVICES, BATCH, SearchSpec(headroom=0.0, base=BASE, simulate=False)).found


def test_search_suggests_the_largest_possible_number_of_devices():
    base = replace(cluster(40e9), devices=1000)
    spec = SearchSpec(headroom=0.0, base=BASE, contexts=(1,), simulate=False)
    result = search(MODEL, base, 997, BATCH, spec)
    assert result.found == ()
    text = " ".join(result.nothing)
    actual = int(text.split("with ")[-1].split(" devices")[0])
    assert search(MODEL, base, actual, BATCH, spec).layouts > 0


@cases(
    "devices, batch, changed, text",
    (8, 8, {"base": replace(BASE, tensor_overlap=5.0)}, "tensor_overlap = 5.0"),
    (8, 8, {"base": replace(BASE, library="foo")}, "library = 'foo'"),
    (8, 8, {"base": replace(BASE, optimizer_slots=-3)}, "optimizer_slots = -3"),
    (0, 8, {}, "at least 1"),
    (16, 8, {}, "has only 8"),
    (8, 0, {}, "at least 1"),
    (8, 8, {"objective": "beauty"}, "choose one of time"),
    (8, 8, {"strategies": ("zero4",)}, "zero4"),
    (8, 8, {"recompute": ()}, "none"),
    (8, 8, {"tensors": (0,)}, "at least 1"),
    (8, 8, {"first": 0}, "at least 1"),
    (8, 8, {"headroom": 1.0}, "headroom"),
    (8, 1 << 50, {}, "a plan is made for at most"),
    (8, 8, {"memory_bytes": -1.0}, "memory_bytes"),
)
def test_bad_search_inputs_are_rejected(devices, batch, changed, text):
    with pytest.raises(UsageError, match=text):
        search(MODEL, cluster(40e9), devices, batch, SearchSpec(**{"base": BASE, **changed}))


def test_objective_without_prices_or_power_is_rejected():
    on = cluster(40e9)
    free = replace(on, site=replace(on.site, device_hour_price=None, kwh_price=None))
    with pytest.raises(UsageError, match="needs a price"):
        run_search(free, objective="cost")
    dark = replace(on, device=replace(on.device, peak_w=0.0, idle_w=0.0))
    with pytest.raises(UsageError, match="power, but the cluster .* has none"):
        run_search(dark, objective="energy")


def test_search_for_a_model_without_transformer():
    from hpcdist.models.config import ModelConfig
    from hpcdist.planner.model.transformer import of_config

    mlp = of_config(ModelConfig(kind="mlp", layers=4, hidden=256), features=64, classes=10)
    on = cluster(40e9)
    result = search(mlp, on, DEVICES, 64, SearchSpec(headroom=0.0, base=replace(BASE, implementation="hpcdist")))
    assert result.found
    assert all(one.estimate.layout.tensor == one.estimate.layout.context == 1 for one in result.found)


def test_reserved_share_of_the_memory_stays_free():
    free, full = (run_search(cluster(0.3e9), headroom=headroom).found for headroom in (0.2, 0.0))
    assert all(one.estimate.memory.bytes <= 0.24e9 for one in free)
    assert any(one.estimate.memory.bytes > 0.24e9 for one in full)


def test_search_collects_the_flags_of_its_results():
    result = run_search(cluster(40e9), contexts=(2,), first=3)
    assert set(result.flags) >= {flag for one in result.found for flag in one.estimate.flags}
    assert result.found[-1].why == (), "the next one is not shown"


def test_but_equals_dataclass_replace(rng):
    draw = random.Random(int(rng.integers(1 << 62)))
    for _, layout, _, _ in random_layouts("megatron-2022", draw, 10):
        _, other, _, _ = next(random_layouts("hpcdist", draw, 1))
        changed = {name: getattr(other, name) for name in draw.sample(sorted(asdict(layout)), 5)}
        assert layout.but(**changed) == replace(layout, **changed)
        assert hash(layout.but()) == hash(layout)
    with pytest.raises(TypeError, match="beauty"):
        layout.but(data=2, beauty=3)


@pytest.mark.parametrize("implementation", ["megatron-2022", "hpcdist"])
@pytest.mark.full_except("hpcdist")
def test_memory_of_random_layouts_is_the_highest_of_all_ranks(implementation, rng):
    """Each rank is computed separately.

    Values shared between layouts, and ranks that are skipped, must not hide a higher value.
    """
    draw = random.Random(int(rng.integers(1 << 62)))
    for model, layout, on, batch in random_layouts(implementation, draw, 100):
        needed = memory(model, layout, on, batch)
        fullest = max(sum(terms.values()) for terms in by_rank(model, layout, on, batch))
        assert needed.bytes == pytest.approx(fullest + on.device.reserved_bytes, rel=1e-12), layout
