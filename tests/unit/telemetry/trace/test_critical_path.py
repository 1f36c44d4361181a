"""The critical path compared with the longest of all paths, closed forms and the schedule simulator."""

from collections import defaultdict

import numpy as np
import pytest

from hpcdist.strategies.schedule import timeline as simulate_timeline
from hpcdist.strategies.schedule.operation_list import generated
from hpcdist.strategies.schedule.registry import SCHEDULES
from hpcdist.strategies.schedule.simulated_program import RECV, SEND, StepCosts
from hpcdist.strategies.schedule.simulated_program import LinkCost as Wire
from hpcdist.telemetry.trace import critical_path as trace_critical_path
from hpcdist.telemetry.trace.critical_path import PathSegment, critical_path
from hpcdist.telemetry.trace.timeline import TimelinePiece


class Dag:
    """Ranks that compute, meet and send, as nodes with durations, which determine all times."""

    def __init__(self, ranks):
        self.rows = [[] for _ in range(ranks)]  # of each rank: (duration, nodes that it needs besides the one before)
        self.nodes = []  # (duration, needed nodes)
        self.last = [None] * ranks
        self.pieces = defaultdict(list)
        self.end = []
        self.begin = []

    def add(self, duration, needs):
        self.nodes.append((duration, tuple(need for need in needs if need is not None)))
        begin = max((self.end[need] for need in self.nodes[-1][1]), default=0)
        self.begin.append(begin)
        self.end.append(begin + duration)
        return len(self.nodes) - 1

    def now(self, rank):
        return 0 if self.last[rank] is None else self.end[self.last[rank]]

    def compute(self, rank, duration, name="work"):
        begin = self.now(rank)
        self.last[rank] = self.add(duration, [self.last[rank]])
        self.pieces[rank].append(TimelinePiece(rank, "compute", name, begin, begin + duration))

    def meet(self, ranks, duration):
        came = {rank: self.now(rank) for rank in ranks}
        by = max(ranks, key=lambda rank: came[rank])
        node = self.add(duration, [self.last[rank] for rank in ranks])
        for rank in ranks:
            self.last[rank] = node
            late = came[by] > came[rank]
            cause = (by, came[by]) if late else (rank, came[rank])
            self.pieces[rank].append(TimelinePiece(rank, "communication", "meet", came[rank], self.end[node], *cause))

    def message(self, source, to, latency):
        """Add a send that waits for nobody, and its receive."""
        sent = self.now(source)
        travel = self.add(latency, [self.last[source]])
        came = self.now(to)
        arrives = self.end[travel]
        if arrives <= came:
            return  # it was there before: nothing is waited for
        self.last[to] = self.add(0, [self.last[to], travel])
        late = (source, sent) if sent > came else (to, came)
        if sent <= came:  # on its way when it was waited for: to the receiver it is a transfer of its own
            late = (source, sent)
        self.pieces[to].append(TimelinePiece(to, "communication", "recv", came, arrives, *late))

    def longest(self):
        """Return the longest path by enumeration of all paths."""

        def paths(node):
            duration, needs = self.nodes[node]
            if not needs:
                yield duration
            for need in needs:
                for before in paths(need):
                    yield before + duration

        return max(length for node in range(len(self.nodes)) for length in paths(node))


def random_dag(rng, ranks, events):
    dag = Dag(ranks)
    for _ in range(events):
        kind = rng.integers(0, 4)
        if kind <= 1:
            dag.compute(int(rng.integers(0, ranks)), int(rng.integers(1, 100)))
        elif kind == 2 and ranks > 1:
            chosen = sorted(rng.choice(ranks, int(rng.integers(2, ranks + 1)), replace=False).tolist())
            dag.meet(chosen, int(rng.integers(1, 30)))
        elif ranks > 1:
            source, to = rng.choice(ranks, 2, replace=False).tolist()
            dag.message(source, to, int(rng.integers(1, 40)))
    return dag


def check_chain(path, pieces):
    """Check that the path has no gap, and that each segment lies in a piece of its rank or is a transfer."""
    for link, following in zip(path, path[1:], strict=False):
        assert link.end_ns == following.begin_ns and link.took_ns > 0
    for link in path:
        assert link.phase != "other", "nothing in the path is unknown"
        holding = [p for p in pieces[link.rank] if p.begin_ns < link.end_ns <= p.end_ns]
        assert len(holding) == 1 and holding[0].name == link.name
        if not link.travels:
            assert holding[0].phase == "compute" and holding[0].begin_ns <= link.begin_ns


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_critical_path_is_as_long_as_the_longest_path(rng, ranks):
    for _ in range(150):
        dag = random_dag(rng, ranks, int(rng.integers(1, 14)))
        if not any(dag.pieces.values()):
            continue
        path = critical_path(dag.pieces)
        ends = {rank: row[-1].end_ns for rank, row in dag.pieces.items()}
        assert path[-1].end_ns == max(ends.values())
        assert path[0].begin_ns == 0 and sum(link.took_ns for link in path) == max(ends.values())
        check_chain(path, dag.pieces)
        if all(ends[rank] == dag.now(rank) for rank in ends) and max(ends.values()) == max(dag.end):
            assert sum(link.took_ns for link in path) == dag.longest()


def test_shares_of_the_critical_path_by_rank_and_phase(rng):
    """Shortening a piece on the path shortens the whole. A piece off the path has slack."""
    dag = Dag(3)
    for step in range(3):
        for rank, ns in enumerate((10, 30, 20)):
            dag.compute(rank, ns + step, f"work {step}")
        dag.meet([0, 1, 2], 5)
    of_rank, of_phase, of_name = trace_critical_path.path_shares(critical_path(dag.pieces))
    assert of_rank == {1: 93, -1: 15}, "the slowest computes, the rest is transfer"
    assert of_phase == {"compute": 93, "communication": 15}
    assert of_name == {"work 0": 30, "work 1": 31, "work 2": 32, "meet": 15}


def test_waits_are_attributed_to_their_causes():
    dag = Dag(3)
    for rank, ns in enumerate((10, 30, 20)):
        dag.compute(rank, ns, f"work of {rank}")
    dag.meet([0, 1, 2], 5)
    dag.compute(2, 50, "more")
    dag.message(2, 0, 7)
    assert trace_critical_path.waited_for(dag.pieces) == {(0, 1): 20, (2, 1): 10, (0, 2): 50}
    longest = trace_critical_path.longest_waits(dag.pieces, range(3))[:2]
    assert [(wait.rank, wait.by, wait.name, doing, wait.waited_ns) for wait, doing in longest] == [
        (0, 2, "recv", "more", 50), (0, 1, "meet", "work of 1", 20)
    ]  # fmt: skip


def test_critical_path_follows_messages_to_the_sender():
    """In a pipeline of two stages with one micro-batch, everything is on the path."""
    dag = Dag(2)
    dag.compute(0, 10, "F")
    dag.message(0, 1, 3)
    dag.compute(1, 20, "FB")
    dag.message(1, 0, 3)
    dag.compute(0, 12, "B")
    path = critical_path(dag.pieces)
    assert [(link.rank, link.name, link.took_ns, link.travels) for link in path] == [
        (0, "F", 10, False), (1, "recv", 3, True), (1, "FB", 20, False), (0, "recv", 3, True), (0, "B", 12, False)
    ]  # fmt: skip


def test_critical_path_follows_a_slow_transfer():
    """Rank 1 waits for a message that rank 0 sent long before: the transfer is critical, not the work of rank 1."""
    pieces = {
        0: [TimelinePiece(0, "compute", "a", 0, 10), TimelinePiece(0, "compute", "c", 10, 40)],
        1: [TimelinePiece(1, "compute", "b", 0, 60), TimelinePiece(1, "communication", "WAIT", 60, 100, 0, 10)],
    }
    path = critical_path(pieces)
    assert path == [
        PathSegment(0, "compute", "a", 0, 10),
        PathSegment(1, "communication", "WAIT", 10, 100, travels=True),
    ]
    assert trace_critical_path.waited_for(pieces) == {}, "nobody was waited for: it was on its way"


def test_critical_path_tolerates_gaps_and_clock_errors():
    """Times have gaps, and some causes are later than their effects. There still is a path."""
    pieces = {
        0: [TimelinePiece(0, "compute", "a", 0, 10), TimelinePiece(0, "communication", "x", 20, 30, 1, 35)],
        1: [TimelinePiece(1, "compute", "b", 0, 28), TimelinePiece(1, "communication", "x", 28, 31, 0, 33)],
    }
    path = critical_path(pieces)
    assert path[-1].end_ns == 31 and path[0].begin_ns == 0
    assert sum(link.took_ns for link in path) == 31
    assert critical_path({}) == critical_path({0: []}) == []


def simulated_pieces(timeline):
    """Return the simulated timeline as pieces of whole numbers. A receive waits for the end of its send."""
    program, times = timeline.program, timeline.times
    sends = {int(program.target[entry]): entry for entry in np.flatnonzero(program.code == SEND)}
    pieces = {}
    for rank in range(program.ranks):
        row = program.row(rank)
        pieces[rank] = []
        for entry in range(row.start, row.stop):
            begin, end = int(times.begin_s[entry]), int(times.end_s[entry])
            if end == begin:
                continue
            if program.code[entry] == RECV:
                sent = sends[int(program.target[entry])]
                by, since = program.rank_of(sent), int(times.end_s[sent])
                pieces[rank].append(TimelinePiece(rank, "communication", "recv", begin, end, by, since))
            else:
                pieces[rank].append(TimelinePiece(rank, "compute", str(int(program.work[entry])), begin, end))
    return pieces


@pytest.mark.parametrize("name", [name for name, schedule in SCHEDULES.items() if schedule.pipelines])
def test_critical_path_matches_the_simulator(name, rng):
    """The critical path of a simulated step is found from its times alone."""
    for stages, microbatches in ((1, 2), (2, 4), (4, 8)):
        chunks = 2 if SCHEDULES[name].most is None else 1
        written = generated(name, stages, microbatches, chunks)
        units = stages * written.chunks
        place = written.place([range(unit, unit + 1) for unit in range(units)])
        for wire in (Wire(), Wire(latency_s=3.0)):
            costs = rng.integers(1, 9, (4, units)).astype(float).tolist()
            names = ("forward_s", "backward_s", "input_s", "weight_s")
            timeline = simulate_timeline.simulate_passes(
                [simulate_timeline.compact(row) for row in written.passes],
                place,
                StepCosts(**dict(zip(names, costs, strict=True)), link=wire),
            )
            pieces = simulated_pieces(timeline)
            path = critical_path(pieces)
            assert sum(link.took_ns for link in path) == timeline.makespan_s
            check_chain(path, pieces)
            assert sum(link.end_s - link.begin_s for link in timeline.critical_path()) == timeline.makespan_s
            # Transfers take no time without a wire, and with one as much on both paths.
            travels = sum(link.took_ns for link in path if link.travels)
            crossings = sum(one.rank != other.rank for one, other in zip(path, path[1:], strict=False))
            assert travels == 0 if wire == Wire() else travels % 3 == 0 and crossings >= bool(travels)


def test_hidden_exposed_and_waited_times():
    row = [
        TimelinePiece(0, "compute", "F", 0, 100),
        TimelinePiece(0, "communication", "AGREE", 100, 130, 1, 120),
        TimelinePiece(0, "update", "APPLY", 130, 150),
    ]
    result = trace_critical_path.communication_overlap(row, [(50, 90), (80, 110), (140, 145), (145, 145)])
    assert (result.hidden_ns, result.exposed_ns, result.waited_ns) == (55, 30, 20)
    assert result.hidden_share == 55 / 65
    nothing = trace_critical_path.communication_overlap([TimelinePiece(0, "compute", "F", 0, 9)], [])
    assert nothing.hidden_share is None


def test_common_time_of_intervals_matches_brute_force(rng):
    for _ in range(100):
        a, b = (
            [tuple(sorted(pair)) for pair in rng.integers(0, 60, (int(rng.integers(0, 6)), 2)).tolist()] for _ in "ab"
        )
        held = [np.zeros(60, bool), np.zeros(60, bool)]
        for marks, intervals in zip(held, (a, b), strict=True):
            for begin, end in intervals:
                marks[begin:end] = True
        ours = trace_critical_path.intersection_ns(trace_critical_path.union(a), trace_critical_path.union(b))
        assert ours == int((held[0] & held[1]).sum())
        assert sum(end - begin for begin, end in trace_critical_path.union(a)) == int(held[0].sum())
