"""The verifier: it proves valid schedules, bounds their memory, and rejects each way to break them."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.marks import cases
from hpcdist.arrays.ranges import Range, coverage, cut, split
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ScheduleError
from hpcdist.strategies.core.grid import GridCommunicators, ProcessGrid
from hpcdist.strategies.core.operations import Kind, Operation, StagePlacement, looped
from hpcdist.strategies.schedule.operation_list import insert_exchange, insert_gathers
from hpcdist.strategies.schedule.passes import expand, gpipe, one_f_one_b
from hpcdist.strategies.schedule.verify.proof import verify

UNIT = 40  # elements of a unit
UPDATE = (Kind.DIRECTION, Kind.APPLY)
PIPELINES = {"gpipe": gpipe, "1f1b": one_f_one_b}


@dataclass
class Step:
    """The lists of all ranks of a grid, and the data for their verification."""

    grid: ProcessGrid
    microbatches: int
    units: dict[int, Range]
    lists: list[list[Operation]] = field(default_factory=list)
    needs: dict[int, set[int]] | None = None
    accumulates: bool = True

    def verify(self):
        return verify(
            self.lists,
            grid=self.grid,
            units=self.units,
            microbatches=self.microbatches,
            needs=self.needs,
            accumulates=self.accumulates,
        )

    def assert_rejected(self, match):
        with pytest.raises(ScheduleError, match=match):
            self.verify()

    def index_of(self, rank, text):
        """Return the index of the operation that prints as ``text`` in the list of ``rank``."""
        return [str(op) for op in self.lists[rank]].index(text)

    def move(self, rank, text, to):
        """Move an operation directly before another operation."""
        op = self.lists[rank].pop(self.index_of(rank, text))
        self.lists[rank].insert(self.index_of(rank, to), op)


def part_of(units):
    return Range(UNIT * units.start, UNIT * units.stop)


def reduces(part):
    """Return buckets that do not end at unit borders, last ones first."""
    return [Operation(Kind.REDUCE, range=bucket) for bucket in reversed(list(cut(part, UNIT * 3 // 2)))]


def update(parts):
    return [Operation(kind, range=part) for kind in UPDATE for part in parts]


def allreduce_step(passes_of, stages, microbatches, data=1, units_per_stage=2, recompute=False):
    """Return a pipeline with allreduce: buckets are reduced as soon as they are complete, all replicas update."""
    step = Step(
        ProcessGrid(data=data, pipeline=stages),
        microbatches,
        {unit: Range(UNIT * unit, UNIT * (unit + 1)) for unit in range(stages * units_per_stage)},
    )
    chunks = [range(stage * units_per_stage, (stage + 1) * units_per_stage) for stage in range(stages)]
    placement = looped(chunks, stages)
    for stage, units in enumerate(chunks):
        compute = expand(passes_of(stage, stages, microbatches), placement, stage, recompute=recompute)
        part = part_of(units)
        exchange = [*reduces(part), Operation(Kind.AGREE), *update([part])]
        local_values = {unit: step.units[unit] for unit in units}
        step.lists += [insert_exchange(compute, exchange, local_values) for _ in range(data)]
    return step


@pytest.mark.parametrize("schedule", PIPELINES)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("stages", "data"), [(1, 4), (2, 2), (4, 2), (3, 3), (8, 1)])
def test_replicas_of_pipelines_are_proven(schedule, recompute, stages, data):
    for microbatches in (1, 3, 8):
        step = allreduce_step(PIPELINES[schedule], stages, microbatches, data, 3, recompute)
        proof = step.verify()
        held = [microbatches if schedule == "gpipe" else stages - stage for stage in range(stages)]
        assert proof.live == tuple(min(microbatches, number) for number in held)
        assert proof.messages == 2 * microbatches * (stages - 1) * data
        buckets = sum(op.kind is Kind.REDUCE for op in step.lists[0])
        assert proof.meetings == stages * buckets + 1  # and the agreement
        if recompute:
            assert proof.whole == (1,) * stages, "only the inputs of the others are kept"
        else:
            assert proof.whole == proof.live


def sequential(stage, stages, microbatches):
    return [(way, microbatch, 0) for microbatch in range(microbatches) for way in (Kind.FORWARD, Kind.BACKWARD)]


def one_rank(units):
    return StagePlacement((range(units),), (0,))


def zero_step(zero, data, units, microbatches):
    """Return sharded data parallelism without a pipeline, ZeRO stage 1 to 3. Some shards of small units are empty."""
    step = Step(ProcessGrid(data=data), microbatches, {u: Range(20 * u, 20 * (u + 1)) for u in range(units)})
    step.accumulates = zero == 1
    compute = expand(sequential(0, 1, microbatches), one_rank(units), 0)
    for rank in range(data):
        steps = []
        for op in compute:
            around = [Operation(kind, op.microbatch, op.unit) for kind in (Kind.GATHER, Kind.FREE)]
            steps += [around[0], op, around[1]] if zero == 3 else [op]
            last = op.microbatch == microbatches - 1
            if op.kind is Kind.BACKWARD and (last or not step.accumulates):
                steps.append(Operation(Kind.REDUCE, op.microbatch, range=step.units[op.unit]))
        local_values = [split(part.size, data, 4)[rank].shift(part.start) for part in step.units.values()]
        directions, applies = ([Operation(kind, range=part) for part in local_values if part] for kind in UPDATE)
        steps += [Operation(Kind.AGREE), *directions, Operation(Kind.NORMS), *applies]
        steps += [] if zero == 3 else [Operation(Kind.GATHER, unit=unit) for unit in step.units]
        step.lists.append(steps)
    return step


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("data", [1, 2, 3, 4])
def test_sharded_steps_are_proven(zero, data):
    for microbatches in (1, 3):
        proof = zero_step(zero, data, 3, microbatches).verify()
        assert proof.live == (1,) and proof.messages == 0


@pytest.mark.parametrize("colocated", [False, True])
def test_parameter_servers_are_proven(colocated):
    """Three workers push, and two servers collect and publish. Servers are dedicated, or two of the workers."""
    parts = [Range(0, 64), Range(64, 120)]
    workers = 3
    step = Step(ProcessGrid(data=workers), 1, {unit: Range(UNIT * unit, UNIT * (unit + 1)) for unit in range(3)})
    serve = [
        ([Operation(Kind.COLLECT, range=part)], [*update([part]), Operation(Kind.PUBLISH, range=part)])
        for part in parts
    ]
    compute = expand(sequential(0, 1, 1), one_rank(3), 0)
    for rank in range(workers):
        collects, updates = serve[rank] if colocated and rank < len(serve) else ([], [])
        pushes = [Operation(Kind.PUSH, range=part) for part in parts]
        pulls = [Operation(Kind.PULL, range=part) for part in parts]
        step.lists.append([*compute, *pushes, *collects, Operation(Kind.AGREE), *updates, *pulls])
    if not colocated:
        step.lists += [[*collects, Operation(Kind.AGREE), *updates] for collects, updates in serve]
    step.verify()
    for steps in step.lists:
        if any(op.kind is Kind.COLLECT for op in steps):
            steps.insert([op.kind for op in steps].index(Kind.APPLY), Operation(Kind.NORMS))
    step.verify()  # over the ranks that serve
    server = 0 if colocated else workers
    step.move(server, "PUBLISH([0:64])", "APPLY([0:64])")
    step.assert_rejected(rf"rank {server}: PUBLISH\(\[0:64\]\) comes before APPLY\(\[0:64\]\)")
    step.lists[server].pop(step.index_of(server, "PUBLISH([0:64])"))
    step.assert_rejected(r"PULL\(\[0:64\]\) waits for a PUBLISH .* no rank has")


def tied_step():
    """Return two stages. The last stage holds a copy of the first unit's tensor."""
    step = allreduce_step(PIPELINES["1f1b"], 2, 3, data=2)
    step.needs = {3: {0}}
    for rank, steps in enumerate(step.lists):
        last_backward = max(index for index, op in enumerate(steps) if op.kind is Kind.BACKWARD)
        before = [op for op in steps[: last_backward + 1] if op.kind is not Kind.REDUCE]
        after = [op for op in steps[last_backward + 1 :] if op.kind not in (Kind.REDUCE, Kind.SEND_GRADIENT)]
        sends = [op for op in steps[last_backward + 1 :] if op.kind is Kind.SEND_GRADIENT]
        copy = [Operation(Kind.COPY_GRADIENT, unit=0)]
        units = range(2) if rank < 2 else range(2, 4)
        step.lists[rank] = [
            *before,
            *sends,
            *copy,
            *reduces(part_of(units)),
            *after,
            Operation(Kind.COPY_VALUE, unit=0),
        ]
    return step


def test_tied_tensors_across_stages_are_proven():
    tied_step().verify()


@cases(
    "rank, op, to, match",
    (0, "COPY_GRADIENT(0)", "AGREE()", r"rank 0: .* put REDUCE\(\[0:60\]\) after COPY_GRADIENT\(0\)"),
    (2, "COPY_GRADIENT(0)", "BACKWARD(2, 3)", r"rank 2: .* put COPY_GRADIENT\(0\) after BACKWARD\(2, 3\)"),
    (0, "COPY_VALUE(0)", "APPLY([0:80])", r"rank 0: .* put COPY_VALUE\(0\) after APPLY\(\[0:80\]\)"),
)
def test_copies_out_of_order_are_rejected(rank, op, to, match):
    step = tied_step()
    step.move(rank, op, to)
    step.assert_rejected(match)


def test_copy_without_a_counterpart_is_rejected():
    step = tied_step()
    step.lists[2].pop(step.index_of(2, "COPY_VALUE(0)"))
    step.assert_rejected(r"rank 0: COPY_VALUE\(0\) is collective, but no other rank of the pipeline \[0, 2\]")


@pytest.mark.parametrize("data", [1, 2])
def test_cyclic_wait_is_rejected(data):
    """The first stage waits for a gradient before it sends the second micro-batch; the next stage needs both first."""

    def mixed(stage, stages, microbatches):
        return (sequential if stage == 0 else PIPELINES["gpipe"])(stage, stages, microbatches)

    allreduce_step(mixed, 2, 1, data).verify()
    allreduce_step(mixed, 2, 2, data).assert_rejected(
        rf"a cyclic wait: rank 0 waits in RECV_GRADIENT\(0, 2\) for rank {data}; "
        rf"rank {data} waits in RECV_ACTIVATION\(1, 2\) for rank 0$"
    )


def test_messages_are_matched_by_name_in_any_order():
    def swapped(stage, stages, microbatches):
        passes = PIPELINES["gpipe"](stage, stages, microbatches)
        return [(way, 1 - mb if stage and way is Kind.FORWARD else mb, chunk) for way, mb, chunk in passes]

    allreduce_step(swapped, 2, 2).verify()
    step = allreduce_step(PIPELINES["gpipe"], 2, 2)
    receive = step.lists[1][step.index_of(1, "RECV_ACTIVATION(1, 2)")]
    for wrong, match in (
        (replace(receive, unit=1), r"found RECV_ACTIVATION\(1, 1\), expected RECV_ACTIVATION\(1, 2\)"),
        (
            replace(receive, microbatch=0),
            r"micro-batch 0: found RECV_ACTIVATION\(0, 2\), expected BACKWARD\(0, 3\)",
        ),
    ):
        broken = replace(step, lists=[step.lists[0], [wrong if op == receive else op for op in step.lists[1]]])
        broken.assert_rejected("rank 1: .*" + match)


def test_operation_that_is_too_early_is_rejected():
    step = allreduce_step(PIPELINES["1f1b"], 2, 4, data=2)
    step.move(1, "REDUCE([0:60])", "BACKWARD(3, 0)")
    step.assert_rejected(r"rank 1: .* put REDUCE\(\[0:60\]\) after BACKWARD\(3, 0\)")
    step = allreduce_step(PIPELINES["1f1b"], 2, 4, data=2)
    step.move(1, "APPLY([0:80])", "DIRECTION([0:80])")
    step.assert_rejected(r"rank 1: APPLY\(\[0:80\]\) comes before DIRECTION\(\[0:80\]\)")
    step.move(1, "DIRECTION([0:80])", "APPLY([0:80])")
    step.move(1, "DIRECTION([0:80])", "AGREE()")
    step.assert_rejected(r"rank 1: DIRECTION\(\[0:80\]\) comes before AGREE\(\)")


def test_collectives_in_different_orders_are_rejected():
    step = allreduce_step(PIPELINES["gpipe"], 1, 1, data=2)
    step.move(1, "REDUCE([60:80])", "AGREE()")  # still complete, but after the other reduction
    step.assert_rejected("must call their collectives in the same order")
    step = allreduce_step(PIPELINES["gpipe"], 2, 1, data=2)
    step.move(0, "REDUCE([0:60])", "DIRECTION([0:80])")
    step.assert_rejected(r"rank 0: REDUCE\(\[0:60\]\) comes after AGREE\(\)")


def test_layers_lost_by_the_partition_are_rejected():
    """30 layers on 4 stages once lost two layers silently (NVIDIA/Megatron-LM#1304)."""
    step = allreduce_step(PIPELINES["1f1b"], 2, 2)
    step.units[4] = Range(4 * UNIT, 5 * UNIT)
    step.assert_rejected(r"compute the model units \[\[0, 1\], \[2, 3\]\]; .* every unit of \[.*\] must")


def test_lists_for_fewer_ranks_are_rejected():
    step = allreduce_step(PIPELINES["1f1b"], 2, 2)
    step.lists.pop()
    step.assert_rejected("1 operation lists for the 2 ranks")


@cases(
    "op, to, match",
    ("FREE(0, 1)", "FORWARD(0, 1)", r"FORWARD\(0, 1\) uses unit 1, which is not gathered at this point"),
    ("GATHER(1, 0)", "FREE(0, 0)", r"GATHER\(1, 0\) gathers unit 0, which is already gathered"),
    ("FREE(0, 2)", "GATHER(0, 2)", r"FREE\(0, 2\) frees unit 2, which is not gathered"),
)
def test_use_of_missing_units_is_rejected(op, to, match):
    step = zero_step(3, 2, 3, 2)
    step.move(0, op, to)
    step.assert_rejected("rank 0: " + match)


@pytest.mark.parametrize("passes_of", [sequential, *PIPELINES.values()])
@pytest.mark.parametrize("needs", [{u: [u] for u in range(3)}, {0: [0], 1: [1], 2: [0, 2]}])
def test_gathered_units_outlive_any_order_of_microbatches(passes_of, needs):
    """A unit that a tied unit uses too must outlive a micro-batch that ends while others are in flight."""
    step = zero_step(3, 2, 3, 4)
    step.needs = {unit: set(used) for unit, used in needs.items()}
    compute = insert_gathers(expand(passes_of(0, 1, 4), one_rank(3), 0), needs)
    for rank, steps in enumerate(step.lists):
        update = steps[step.index_of(rank, "AGREE()") :]
        reduces = [Operation(Kind.REDUCE, range=part) for part in reversed(step.units.values())]
        step.lists[rank] = insert_exchange(compute, reduces, step.units, every_microbatch=True) + update
    step.verify()


def test_use_of_a_missing_tied_unit_is_rejected():
    step = zero_step(3, 2, 3, 1)
    step.verify()
    step.needs = {2: {0}}
    step.assert_rejected(r"rank 0: FORWARD\(0, 2\) uses unit 0, which is not gathered at this point")


def test_units_with_old_values_are_rejected():
    step = zero_step(3, 2, 3, 1)
    last = [index for index, op in enumerate(step.lists[1]) if op.kind is Kind.FREE][-1]
    step.lists[1].append(step.lists[1].pop(last))
    step.assert_rejected(r"rank 1: APPLY\(\[16:20\]\) updates unit 0 while old parameters of this unit are gathered")
    step = zero_step(1, 2, 3, 1)
    step.lists[1].pop(step.index_of(1, "GATHER(2)"))
    step.assert_rejected(r"rank 1: unit 2 has old parameters")
    step = zero_step(1, 2, 3, 1)
    step.move(1, "GATHER(2)", "NORMS()")
    step.assert_rejected(r"rank 1: unit 2 has old parameters")


def test_elements_without_an_update_are_rejected():
    step = zero_step(2, 4, 1, 2)
    for kind in UPDATE:
        step.lists[1].pop(next(index for index, op in enumerate(step.lists[1]) if op.kind is kind))
    step.assert_rejected(r"\[16:20\] of unit 0 is updated by 0 of the 4 ranks")


def test_missing_reduction_per_microbatch_is_rejected():
    step = zero_step(2, 2, 2, 3)
    step.verify()
    step.accumulates = True
    step.assert_rejected(r"put REDUCE\(0, \[0:20\]\) after BACKWARD\(1, 0\)")
    step = zero_step(1, 2, 2, 3)
    step.accumulates = False
    step.assert_rejected(r"the gradient of unit 0 in the parameter range \[0:20\] is never exchanged")


@st.composite
def broken_step(draw):
    """Return a step in which one operation of one rank is missing, doubled, or names another micro-batch."""
    step = allreduce_step(
        PIPELINES[draw(st.sampled_from(list(PIPELINES)))],
        draw(st.integers(2, 4)),
        draw(st.integers(1, 6)),
        draw(st.integers(2, 3)),
        draw(st.integers(1, 3)),
        draw(st.booleans()),
    )
    rank = draw(st.integers(0, len(step.lists) - 1))
    index = draw(st.integers(0, len(step.lists[rank]) - 1))
    op = step.lists[rank][index]
    change = draw(st.sampled_from(["drop", "double", "relabel"] if op.microbatch >= 0 else ["drop", "double"]))
    if change == "drop":
        whole_pass = op.recompute and len(step.units) == step.grid.pipeline
        assume(not whole_pass)  # a stage of one unit that does not run it again has kept its activations: no harm
        del step.lists[rank][index]
    elif change == "double":
        step.lists[rank].insert(draw(st.integers(0, len(step.lists[rank]))), op)
    else:
        step.lists[rank][index] = replace(op, microbatch=op.microbatch + draw(st.sampled_from([-1, 1, 7])))
    return step, f"{change} {op} of rank {rank}"


@given(broken_step())
@settings(max_examples=150)
@pytest.mark.full
def test_missing_doubled_or_renamed_operations_are_rejected(case):
    step, what = case
    try:
        proof = step.verify()
    except ScheduleError as error:
        message = str(error)
    else:
        pytest.fail(f"accepted: {what}, {proof}")
    assert "rank" in message


@st.composite
def shuffled_step(draw):
    """Return a step in which a few operations have changed places."""
    step = allreduce_step(
        PIPELINES[draw(st.sampled_from(list(PIPELINES)))], draw(st.integers(1, 3)), draw(st.integers(1, 4)), 2, 1
    )
    for _ in range(draw(st.integers(1, 3))):
        steps = step.lists[draw(st.integers(0, len(step.lists) - 1))]
        index = draw(st.integers(0, len(steps) - 2))
        steps[index : index + 2] = reversed(steps[index : index + 2])
    return step


@given(shuffled_step())
@settings(max_examples=150)
def test_accepted_lists_complete_and_deadlocks_are_rejected(step):
    """The lists run as real messages of threads: a receive gets its intended micro-batch, and there is no deadlock."""
    try:
        step.verify()
    except ScheduleError:
        return
    run_threads(step.grid.size, lambda comm: play(comm, step), deadline_s=20)


def play(comm, step):
    data = GridCommunicators(step.grid, comm).data
    stride = step.grid.data
    number = np.zeros(1)
    for op in step.lists[comm.rank]:
        onward = op.kind in (Kind.SEND_ACTIVATION, Kind.RECV_GRADIENT)
        peer = comm.rank + (stride if onward else -stride)
        back = op.kind in (Kind.SEND_GRADIENT, Kind.RECV_GRADIENT)
        tag = 2 * (op.microbatch * len(step.units) + op.unit) + back
        if op.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
            comm.isend(np.array([float(op.microbatch)]), peer, tag)
        elif op.kind in (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT):
            comm.recv(number, peer, tag)
            assert number[0] == op.microbatch
        elif op.kind is Kind.REDUCE:
            assert op.range is not None
            ranges = np.array([op.range.start, op.range.start], float)
            data.allreduce(ranges, "max")
            assert ranges[0] == op.range.start
        elif op.kind is Kind.AGREE:
            comm.allreduce(number)


def test_coverage_counts_the_parts_of_each_piece():
    assert coverage(Range(0, 10), [Range(2, 6), Range(4, 20), Range(7, 7)]) == [
        (Range(0, 2), 0),
        (Range(2, 4), 1),
        (Range(4, 6), 2),
        (Range(6, 10), 1),
    ]
    assert coverage(Range(3, 3), [Range(0, 9)]) == []
