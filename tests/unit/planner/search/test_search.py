"""The search finds what looking at every layout finds, counts what it refuses, and says why."""

import gc
import random
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import product

import pytest

from harness.made_plans import problems
from harness.marks import cases
from hpcdist.errors import UsageError
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.limits import checks
from hpcdist.planner.limits.unsupported import unsupported
from hpcdist.planner.memory.device import by_rank, memory
from hpcdist.planner.model.description import TransformerShape
from hpcdist.planner.model.transformer import describe
from hpcdist.planner.plan import plan
from hpcdist.planner.search import bounds, space
from hpcdist.planner.search.best_layouts import search
from hpcdist.planner.search.space import SearchSpec
from hpcdist.planner.time.pipeline import border
from hpcdist.planner.time.step import microbatch_flow
from hpcdist.strategies.schedule.generate.registry import SCHEDULES

DEVICES, BATCH, STEPS = 8, 12, 100
MODEL = describe(TransformerShape(layers=4, hidden=1024, heads=4, vocabulary=16384, context=256, dropout=0.1), "small")
BASE = ParallelLayout(implementation="megatron")


@lru_cache
def cluster(memory_bytes, best_mfu=0.0):
    """Two nodes of four A100, with so much memory, and a limit of MFU or none."""
    known = toml_file.read("a100-selene")
    node = replace(known.node, devices=4)
    levels = (replace(known.levels[0], devices=4), *known.levels[1:])
    site = replace(known.site, device_hour_price=2.0, kwh_price=0.2, currency="EUR")
    device = replace(known.device, memory_bytes=memory_bytes, reserved_bytes=0.0, best_mfu=best_mfu)
    return replace(known, devices=DEVICES, node=node, levels=levels, device=device, site=site)


def searched(on, **wanted):
    """Return what is found on a cluster where nothing has to stay free, without a simulation if not asked for."""
    return search(MODEL, on, DEVICES, BATCH, SearchSpec(**{"headroom": 0.0, "base": BASE, "simulate": False, **wanted}))


def every(base):
    """Yield every value of every degree and way, whether it makes sense or not."""
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
def possible(implementation, memory_bytes):
    """Return the estimates of all layouts that can be: brute force."""
    on, base = cluster(memory_bytes), replace(BASE, implementation=implementation)
    return tuple(
        plan(MODEL, layout, on, BATCH, STEPS) for layout in every(base) if not problems(MODEL, layout, on, BATCH)
    )


def alike(estimate):
    """Return what of a layout makes a difference: a search leaves out choices that make none."""
    layout = estimate.layout
    one = layout.data * layout.context == 1
    same = layout.implementation == "hpcdist" and layout.recompute == "selective"
    return (
        *(layout.data, layout.pipeline, layout.tensor, layout.context, layout.microbatches(BATCH)),
        *(layout.schedule, layout.chunks, layout.sequence_parallel),
        "none" if same else layout.recompute,
        "" if one else layout.strategy,
    )


@pytest.mark.parametrize("implementation", ["megatron", "hpcdist"])
@pytest.mark.parametrize("memory_bytes", [0.3e9, 40e9], ids=["tight", "roomy"])
@pytest.mark.parametrize("objective", space.OBJECTIVES)
@pytest.mark.full
def test_search_equals_brute_force(implementation, memory_bytes, objective):
    """The ten best values of all layouts, each way that makes a difference once."""
    best = {}
    for estimate in possible(implementation, memory_bytes):
        found = bounds.value(estimate, objective)
        best[alike(estimate)] = min(found, best.get(alike(estimate), found))
    base = replace(BASE, implementation=implementation)
    result = searched(cluster(memory_bytes), objective=objective, steps=STEPS, base=base, chunks=(2, 4))
    assert len(best) > 10
    assert [one.value for one in result.found] == pytest.approx(sorted(best.values())[:10], rel=1e-12)
    assert result.estimated < len(best), "it looked at everything"
    refused = sum(one.count for one in result.refused if one.of == "layouts")
    assert result.layouts == result.estimated + refused + result.left_out
    assert result.left_out >= 0


@pytest.mark.parametrize("implementation", ["megatron", "hpcdist"])
@pytest.mark.parametrize("objective", space.OBJECTIVES)
@pytest.mark.full
def test_a_limit_of_mfu_loses_nothing(implementation, objective):
    """Most of the best layouts are at the limit, and equal: the formulas decide between them."""
    mfus = sorted(estimate.mfu for estimate in possible(implementation, 40e9))
    on = cluster(40e9, 0.9999 * mfus[-len(mfus) // 50])
    best = {}
    for estimate in possible(implementation, 40e9):
        limited = plan(MODEL, estimate.layout, on, BATCH, STEPS)
        assert limited.is_capped == (estimate.mfu > on.most_mfu)
        found = bounds.value_and_tie_break(limited, objective)
        assert found[0] >= bounds.value(estimate, objective)
        best[alike(estimate)] = min(found, best.get(alike(estimate), found))
    base = replace(BASE, implementation=implementation)
    result = searched(on, objective=objective, steps=STEPS, base=base, chunks=(2, 4))
    told = [bounds.value_and_tie_break(one.estimate, objective) for one in result.found]
    assert told == [pytest.approx(pair, rel=1e-12) for pair in sorted(best.values())[:10]]
    assert result.found[0].estimate.is_capped or objective != "time"
    assert result.estimated < len(best), "it looked at everything"


@pytest.mark.parametrize("implementation", ["megatron", "hpcdist"])
@pytest.mark.parametrize("objective", space.OBJECTIVES)
@pytest.mark.full_except("time-megatron")
def test_no_layout_is_below_the_bounds_of_its_family_and_order(implementation, objective):
    on, orders = cluster(40e9), {}
    for estimate in possible(implementation, 40e9):
        layout, value = estimate.layout, bounds.value(estimate, objective)
        order = replace(layout, strategy="allreduce")
        if order not in orders:
            orders[order] = floors(MODEL, order, on, BATCH, objective)
        assert max(orders[order]) <= value * (1 + 1e-12), layout
    assert len(orders) > 50


def floors(model, order, on, batch, objective):
    """Return the bounds of an order: by its family, by its schedule, by what its micro-batches take."""
    of_all = bounds.family_totals(model, order, on, batch)
    hop_s = border(model, order, on).seconds
    return (
        bounds.family_bound(of_all, order, on, objective),
        bounds.schedule_bound(of_all, order, hop_s, on, objective),
        bounds.order_bound(microbatch_flow(model, order, on, batch), model, order, on, batch, objective),
    )


def drawn_layouts(implementation, draw, many):
    """Yield layouts of drawn models on drawn clusters: pipelines, with batches that may not fill the last micro-batch.

    Models are shallow, and some of their vocabularies large, so that ranks are seldom alike.
    """
    found = 0
    while found < many:
        shape = TransformerShape(
            layers=draw.choice([4, 6, 8, 12, 16, 24]),
            hidden=draw.choice([256, 1024, 4096]),
            heads=16,
            vocabulary=draw.choice([1000, 50_000, 250_000]),
            context=draw.choice([64, 512, 2048]),
        )
        known = toml_file.read(draw.choice(["a100-selene", "h100-hgx", "mi250x-frontier"]))
        pipeline = draw.choice([2, 3, 4, 6, 8])
        recompute = draw.choice(["none", "selective", "full"])
        wanted = SearchSpec(base=replace(BASE, implementation=implementation))
        grid = replace(
            wanted.base,
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
        schedule, chunks = draw.choice(space.orders(model, grid, wanted))
        layout = replace(grid, schedule=schedule, chunks=chunks, strategy=draw.choice(wanted.strategies))
        site = replace(known.site, device_hour_price=2.0, kwh_price=0.2, currency="EUR")
        known = replace(known, devices=max(known.devices, layout.devices), site=site)
        if next(checks.shape_problems(model, layout, known, batch), None) is None:
            found += 1
            yield model, layout, known, batch


@pytest.mark.parametrize("implementation", ["megatron", "hpcdist"])
@pytest.mark.full
def test_no_drawn_layout_is_below_its_bounds(implementation, rng):
    near = {"family": [], "schedule": [], "order": []}
    draw = random.Random(int(rng.integers(1 << 62)))
    for model, layout, on, batch in drawn_layouts(implementation, draw, 150):
        estimate = plan(model, layout, on, batch, STEPS)
        for objective in space.OBJECTIVES:
            value = bounds.value(estimate, objective)
            for name, floor in zip(near, floors(model, layout, on, batch, objective), strict=True):
                assert floor <= value * (1 + 1e-12), (name, objective, layout, model.shape, on.name, batch)
                near[name].append(floor / value)
    shares = {name: sum(found) / len(found) for name, found in near.items()}
    assert shares["schedule"] > shares["family"] + 0.02, "a schedule says nothing"
    assert shares["order"] > 0.5


def deep(context=1024):
    """A search among pipelines that wait for most of a step, and exchanges that differ much."""
    shape = TransformerShape(layers=32, hidden=4096, heads=16, vocabulary=1000, context=context)
    wanted = SearchSpec(
        base=BASE,
        compressions=("none", "int8", "powersgd", "onebit"),
        contexts=(1,),
        schedules=("1f1b",),
        recompute=("none",),
        first=1,
        simulate=False,
    )
    return describe(shape, "deep"), toml_file.read("mi250x-frontier"), wanted


@pytest.mark.parametrize("objective", ["energy", "energy-delay"])
def test_pipelines_that_wait_lose_nothing_to_the_bounds_of_their_orders(objective, monkeypatch):
    model, on, wanted = deep()
    wanted = replace(wanted, objective=objective)
    bounded = search(model, on, 2048, 16, wanted)
    monkeypatch.setattr(bounds, "schedule_bound", lambda *_: 0.0)
    monkeypatch.setattr(bounds, "order_bound", lambda *_: 0.0)
    unbounded = search(model, on, 2048, 16, wanted)
    assert [one.value for one in bounded.found] == pytest.approx([one.value for one in unbounded.found], rel=1e-12)
    assert 2 * bounded.estimated < unbounded.estimated


@pytest.mark.parametrize("implementation", ["megatron", "hpcdist"])
@pytest.mark.parametrize("objective", space.OBJECTIVES)
@pytest.mark.parametrize(("pipeline", "tensor", "sequence_parallel"), [(1, 8, True), (8, 1, False), (32, 4, True)])
def test_every_way_is_above_the_bound_of_its_order(implementation, objective, pipeline, tensor, sequence_parallel):
    model, on, wanted = deep(256)
    on = replace(on, site=replace(on.site, device_hour_price=2.0, kwh_price=0.2, currency="EUR"))
    order = replace(
        BASE,
        implementation=implementation,
        data=2048 // (pipeline * tensor),
        pipeline=pipeline,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
    )
    wanted = replace(wanted, strategies=("allreduce", "zero1", "zero2", "zero3", "parameter_server"))
    batch = 2 * order.data  # so a pipeline waits for most of a step
    found = [plan(model, space.with_strategy(order, way), on, batch, STEPS) for way in space.strategies(order, wanted)]
    values = [bounds.value(one, objective) for one in found]
    known = microbatch_flow(model, order, on, batch)
    bound = bounds.order_bound(known, model, order, on, batch, objective)
    assert bound <= min(values) * (1 + 1e-12)
    assert bound > 0.3 * min(values), "a bound that says nothing"
    way = space.strategies(order, wanted)[-1]
    layout = space.with_strategy(order, way)
    assert plan(model, layout, on, batch, STEPS, known=known) == plan(model, layout, on, batch, STEPS)
    assert len(set(values)) > 5


@pytest.mark.full
def test_memory_grows_with_the_micro_batch_and_activations_are_those_of_any_strategy():
    """What the search takes for granted."""
    sizes = {}
    alive = {}
    for estimate in (*possible("megatron", 40e9), *possible("hpcdist", 40e9)):
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


@pytest.mark.parametrize("implementation", ["megatron", "hpcdist"])
@pytest.mark.parametrize(("batch", "size", "others"), [(16, 4, (3,)), (16, 8, (5, 7))])
def test_sizes_that_are_tried_take_nothing_from_each_other(implementation, batch, size, others):
    """An impossible size of micro-batch, or an uneven one, says nothing of the memory of another."""
    on = cluster(0.3e9)

    def layouts(*sizes):
        base = replace(BASE, implementation=implementation)
        wanted = SearchSpec(headroom=0.0, base=base, microbatches=sizes, first=10_000, simulate=False)
        return {one.estimate.layout for one in search(MODEL, on, DEVICES, batch, wanted).found}

    each = [layouts(one) for one in (size, *others)]
    assert len(each[0]) > 10
    assert layouts(size, *others) == set().union(*each)


def test_only_what_runs_where_that_is_wanted():
    on, base = cluster(40e9), replace(BASE, implementation="hpcdist", precision="float32")
    on = replace(
        on, device=replace(on.device, peak_flops={"float32": 19.5e12}, matmul={"float32": on.device.matmul["bfloat16"]})
    )
    servers = replace(base, strategy="parameter_server")
    only = {"base": servers, "strategies": ("parameter_server",), "contexts": (2,)}
    free = searched(on, first=3, **only)
    assert all(one.estimate.layout.context == 2 for one in free.found)
    assert all(any("context" in flag for flag in one.estimate.flags) for one in free.found), "flagged as not built"
    bound = searched(on, base=base, runnable=True, first=20)
    assert len(bound.found) == 20
    assert all(not unsupported(one.estimate.layout) for one in bound.found)
    mixture = describe(replace(MODEL.shape, experts=8, experts_per_token=2), "mixture")
    axes = {"base": replace(base, overlap=0.0), "contexts": (4,), "experts": (1, 8), "tensors": (1,), "first": 50}
    mixed = search(mixture, on, DEVICES, BATCH, SearchSpec(headroom=0.0, runnable=True, simulate=False, **axes)).found
    assert {8, 1} == {one.estimate.layout.expert for one in mixed}, "8 share them out on data 2 x context 4"
    assert all(one.estimate.layout.context == 4 and not unsupported(one.estimate.layout) for one in mixed)
    with_none = searched(on, runnable=True, **only)
    assert with_none.found == ()
    assert {one.limit for one in with_none.refused} >= {"unbuilt"}
    assert with_none.nothing


def test_compression_is_tried_where_it_is_asked_for_only():
    on, base = cluster(40e9), replace(BASE, implementation="hpcdist")
    assert {one.estimate.layout.compression for one in searched(on, base=base).found} == {"none"}
    alone = {"tensors": (1,), "pipelines": (1,), "contexts": (1,)}
    both = searched(on, base=base, compressions=("none", "int8"), first=100, **alone)
    assert {one.estimate.layout.compression for one in both.found} == {"none", "int8"}
    for one in both.found:
        assert one.estimate.layout.overlap == (0.0 if one.estimate.layout.compression == "int8" else 1.0)


def test_fewer_devices_may_be_better():
    on = cluster(40e9)
    all_of_them, fewer = (searched(on, objective="energy", fewer=fewer) for fewer in (False, True))
    assert fewer.found[0].value < all_of_them.found[0].value
    assert fewer.found[0].estimate.layout.devices < DEVICES
    assert all(one.estimate.layout.devices == DEVICES for one in all_of_them.found)


def test_distinct_keeps_the_best_of_each_grid():
    result = searched(cluster(40e9), distinct=True)

    def grid(estimate):
        layout = estimate.layout
        return layout.data, layout.pipeline, layout.tensor, layout.context

    assert len({grid(one.estimate) for one in result.found}) == len(result.found) == 10
    every_best = {}
    for estimate in possible("megatron", 40e9):
        key = grid(estimate)
        every_best[key] = min(estimate.step_s, every_best.get(key, estimate.step_s))
    assert [one.value for one in result.found] == pytest.approx(sorted(every_best.values())[:10])


def test_finalists_are_simulated():
    on = cluster(40e9)
    result = searched(on, pipelines=(4,), schedules=("1f1b",), first=5, steps=STEPS, simulate=True)
    values = [one.value for one in result.found]
    assert values == sorted(values)
    for one in result.found:
        again = plan(MODEL, one.estimate.layout, on, BATCH, STEPS, simulate=True)
        assert one.value == again.step_s


def test_the_first_are_explained_by_terms():
    result = searched(cluster(40e9), simulate=True)
    assert len(result.found) == 10
    for one, behind in zip(result.found, result.found[1:], strict=False):
        assert any("instead of" in line for line in one.why), one.why
        assert one.value <= behind.value
        assert len(one.limits) == 2
        assert "memory" in one.limits[1]
    assert result.found[-1].why == () or "instead of" in result.found[-1].why[0]


def test_cycles_are_collected_again_after_a_search(monkeypatch):
    was_on = []

    def broken(*_):
        was_on.append(gc.isenabled())
        raise RuntimeError("broken")

    searched(cluster(40e9), first=1)
    assert gc.isenabled()
    monkeypatch.setattr(bounds, "family_bound", broken)
    with pytest.raises(RuntimeError, match="broken"):
        searched(cluster(40e9), first=1)
    assert was_on == [False]
    assert gc.isenabled()


def test_what_is_refused_is_counted_by_reason():
    result = searched(cluster(0.3e9))
    reasons = {(one.limit, one.of): one for one in result.refused}
    assert reasons["heads", "grids"].count == 1  # of all products of 8, that of tensor = 8
    assert (
        "does not divide" in reasons["heads", "grids"].example
        or "more than the 4 heads" in reasons["heads", "grids"].example
    )
    assert reasons["layers", "grids"].count >= 1
    assert reasons["memory", "layouts"].count > 100
    assert "GB too much" in reasons["memory", "layouts"].example


def test_where_nothing_fits_it_says_how_much_is_missing_and_what_would_help():
    on = cluster(0.12e9)
    result = searched(on)
    assert result.found == ()
    assert "missing" in result.nothing[0]
    # The device that would do is the smallest on which anything does.
    least = min(estimate.memory.bytes for estimate in possible("megatron", 40e9))
    assert not searched(cluster(least - 1)).found and searched(cluster(least)).found
    assert any("2 times the devices, as data it would fit" in line for line in result.nothing)
    twice = replace(on, devices=2 * DEVICES)
    assert search(MODEL, twice, 2 * DEVICES, BATCH, SearchSpec(headroom=0.0, base=BASE, simulate=False)).found


def test_where_no_product_is_possible_it_names_the_most_devices_that_are():
    known = replace(cluster(40e9), devices=1000)
    wanted = SearchSpec(headroom=0.0, base=BASE, contexts=(1,), simulate=False)
    result = search(MODEL, known, 997, BATCH, wanted)
    assert result.found == ()
    text = " ".join(result.nothing)
    found = int(text.split("on ")[-1].split(" devices")[0])
    assert search(MODEL, known, found, BATCH, wanted).layouts > 0


@cases(
    "devices, batch, changed, text",
    (8, 8, {"base": replace(BASE, tensor_overlap=5.0)}, "tensor_overlap = 5.0"),
    (8, 8, {"base": replace(BASE, library="foo")}, "library = 'foo'"),
    (8, 8, {"base": replace(BASE, optimizer_slots=-3)}, "optimizer_slots = -3"),
    (0, 8, {}, "at least 1"),
    (16, 8, {}, "8 more than the 8"),
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
def test_bad_input(devices, batch, changed, text):
    with pytest.raises(UsageError, match=text):
        search(MODEL, cluster(40e9), devices, batch, SearchSpec(**{"base": BASE, **changed}))


def test_an_objective_without_numbers_is_refused():
    on = cluster(40e9)
    free = replace(on, site=replace(on.site, device_hour_price=None, kwh_price=None))
    with pytest.raises(UsageError, match="has no prices"):
        searched(free, objective="cost")
    dark = replace(on, device=replace(on.device, peak_w=0.0, idle_w=0.0))
    with pytest.raises(UsageError, match="has no power"):
        searched(dark, objective="energy")


def test_a_model_that_is_no_transformer():
    from hpcdist.models.config import ModelConfig
    from hpcdist.planner.model.transformer import of_config

    mlp = of_config(ModelConfig(kind="mlp", layers=4, hidden=256), features=64, classes=10)
    on = cluster(40e9)
    result = search(mlp, on, DEVICES, 64, SearchSpec(headroom=0.0, base=replace(BASE, implementation="hpcdist")))
    assert result.found
    assert all(one.estimate.layout.tensor == one.estimate.layout.context == 1 for one in result.found)


def test_a_share_of_the_memory_stays_free():
    free, full = (searched(cluster(0.3e9), headroom=headroom).found for headroom in (0.2, 0.0))
    assert all(one.estimate.memory.bytes <= 0.24e9 for one in free)
    assert any(one.estimate.memory.bytes > 0.24e9 for one in full)


def test_the_flags_of_what_was_found_are_there():
    result = searched(cluster(40e9), contexts=(2,), first=3)
    assert set(result.flags) >= {flag for one in result.found for flag in one.estimate.flags}
    assert result.found[-1].why == (), "the next one is not shown"


def test_a_layout_with_other_values_is_what_replace_makes(rng):
    draw = random.Random(int(rng.integers(1 << 62)))
    for _, layout, _, _ in drawn_layouts("megatron", draw, 10):
        _, other, _, _ = next(drawn_layouts("hpcdist", draw, 1))
        changed = {name: getattr(other, name) for name in draw.sample(sorted(asdict(layout)), 5)}
        assert layout.but(**changed) == replace(layout, **changed)
        assert hash(layout.but()) == hash(layout)
    with pytest.raises(TypeError, match="beauty"):
        layout.but(data=2, beauty=3)


@pytest.mark.parametrize("implementation", ["megatron", "hpcdist"])
@pytest.mark.full_except("hpcdist")
def test_memory_of_a_drawn_layout_is_that_of_its_fullest_rank(implementation, rng):
    """Of all ranks, each on its own: what is shared between layouts, and ranks that are not looked at, hide nothing."""
    draw = random.Random(int(rng.integers(1 << 62)))
    for model, layout, on, batch in drawn_layouts(implementation, draw, 100):
        needed = memory(model, layout, on, batch)
        fullest = max(sum(terms.values()) for terms in by_rank(model, layout, on, batch))
        assert needed.bytes == pytest.approx(fullest + on.device.reserved_bytes, rel=1e-12), layout
