"""Skip connections past other ranks, between chunks of one rank and inside a chunk: the bits of one process."""

import random
from dataclasses import replace

import numpy as np
import pytest

from harness.marks import cases
from harness.pipelines import (
    SAMPLES,
    UNITS,
    Plan,
    data,
    model,
    parts,
    random_legal_order,
    run,
    run_single_process,
    schedule_passes,
)
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ScheduleError
from hpcdist.models.arena import Arena
from hpcdist.strategies.core.grid import ProcessGrid
from hpcdist.strategies.core.operations import Kind, Operation, StagePlacement, folded, looped
from hpcdist.strategies.schedule import timeline
from hpcdist.strategies.schedule.operation_list import generated
from hpcdist.strategies.schedule.passes import expand
from hpcdist.strategies.schedule.simulated_program import StepCosts
from hpcdist.strategies.schedule.verify.proof import verify
from stubs import late_messages


def compare(plan, *, late=False):
    loss, evaluated, expected = run_single_process(plan.microbatches)
    results = {}
    with pytest.MonkeyPatch.context() as patch:
        if late:  # messages are read and written at the last moment
            late_messages.install(patch)
        ranks = run_threads(plan.placement.stages, lambda comm: run(comm, plan))
    for local_data, of_all, gradients in ranks:
        assert (local_data, of_all) == (loss, evaluated)
        results |= gradients
    assert results == expected


@cases(
    "name, ranks, chunks",
    *(("1f1b", 2, 1), ("gpipe", 4, 1), ("1f1b", 8, 1), ("interleaved", 2, 2), ("interleaved", 2, 4)),
    *(("zb-h1", 3, 1), ("zb-h2", 2, 1), ("zb-v", 2, 2), ("zb-v", 4, 2)),
)
@pytest.mark.full_except("zb-v-2-2")
def test_schedules_with_skips_have_the_bits_of_one_process(name, ranks, chunks):
    compare(schedule_passes(name, ranks, chunks, 8), late=ranks == 2)


def test_any_legal_order_has_the_bits_of_one_process():
    for seed in range(12):
        draw = random.Random(seed)
        ranks = draw.choice([1, 2, 2, 3])
        chunks = ranks * draw.choice([1, 2])
        fold = chunks == 2 * ranks and draw.random() < 0.5
        placement = replace((folded if fold else looped)(parts(UNITS, chunks, draw), ranks), skips=model().skips)
        microbatches = draw.choice([1, 3, 8])
        plan = Plan(placement, random_legal_order(placement, microbatches, draw.random() < 0.5, draw), microbatches)
        compare(plan, late=seed % 2 == 0)


def test_gradients_with_skips_match_finite_differences():
    """The model's forward and backward, and the executor, are compared with finite differences of its evaluation."""
    built = model()
    store, gradient = (FlatStore(built.layout, built.dtype) for _ in range(2))
    built.initialise(store, seed=3)
    x, targets = data()
    parameters, into, arena = built.bind(store), built.bind_gradients(gradient), Arena()
    loss = built.loss.forward(built.forward(parameters, x, arena), targets, built.operations, arena.saved(UNITS - 1))
    built.backward(parameters, into, 1.0, arena)
    assert loss == pytest.approx(built.evaluate(parameters, x, targets, arena), rel=1e-14)
    draw = np.random.default_rng(2)
    for segment in built.layout.segments:
        place = int(draw.integers(segment.range.start, segment.range.stop))
        value, sides = store.array[place], []
        for step in (1e-6, -1e-6):
            store.array[place] = value + step
            sides.append(built.evaluate(parameters, x, targets, arena))
        store.array[place] = value
        assert gradient.array[place] == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-5, abs=1e-7)
    executed = run_single_process(1)
    assert executed[1] == pytest.approx(loss, rel=1e-14)
    for segment in built.layout.segments:
        local_data = np.frombuffer(executed[2][segment.key]) * SAMPLES
        np.testing.assert_allclose(local_data, gradient.array[segment.range.slice], rtol=1e-12, atol=1e-14)


def prove_with_change(placement, change):
    written = generated("1f1b", 3, 2)
    steps = [expand(written.passes[rank], placement, rank) for rank in range(3)]
    built = model()
    units = {unit: built.layout.units[stage.layer] for unit, stage in enumerate(built.stages)}
    ranges = [{unit: units[unit] for chunk in placement.of(rank) for unit in chunk} for rank in range(3)]
    for rank, local_data in enumerate(steps):
        local_data[:] = [op for op in local_data if op not in change.get(rank, [])]
        local_data += [Operation(Kind.REDUCE, range=part) for part in ranges[rank].values()]
        local_data += [
            Operation(kind, range=part) for kind in (Kind.DIRECTION, Kind.APPLY) for part in ranges[rank].values()
        ]
    verify(steps, grid=ProcessGrid(pipeline=3), units=units, microbatches=2, placement=placement)


def test_messages_over_skips_are_proven():
    """Messages go directly from the first rank to the last.

    None may be missing, and each must have the right receiver.
    """
    placement = StagePlacement((range(3), range(3, 5), range(5, 8)), (0, 1, 2), model().skips)
    prove_with_change(placement, {})
    straight = Operation(Kind.SEND_ACTIVATION, 1, 5, source=0)
    assert str(straight) == "SEND_ACTIVATION(1, 5, from 0)"
    with pytest.raises(ScheduleError, match=r"found .*, expected SEND_ACTIVATION\(1, 5, from 0\)"):
        prove_with_change(placement, {0: [straight]})
    without = replace(placement, skips=tuple(skip for skip in placement.skips if skip != (0, 5)))
    with pytest.raises(ScheduleError):
        verify(
            [expand(generated("1f1b", 3, 2).passes[rank], placement, rank) for rank in range(3)],
            grid=ProcessGrid(pipeline=3),
            units={unit: model().layout.units[unit] for unit in range(UNITS)},
            microbatches=2,
            placement=without,
        )


def test_simulator_sends_skips_directly():
    """Only skip connections use the links between the first rank and the last."""
    straight = {0 * 3 + 2, 2 * 3 + 0}
    for skips in ((), model().skips):
        placement = StagePlacement((range(3), range(3, 5), range(5, 8)), (0, 1, 2), skips)
        steps = [expand(generated("1f1b", 3, 2).passes[rank], placement, rank) for rank in range(3)]
        links = timeline.simulate_lists(steps, placement, StepCosts.equal(UNITS, 1.0, 1.0, 1.0)).program.links
        assert straight & set(links.tolist()) == (straight if skips else set())
