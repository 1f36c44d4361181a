"""Choosing by measurement on threads: what is measured is the clock, so the clock is made up where times matter."""

import itertools
import json
import os
import threading
import time

import numpy as np
import pytest

from harness.marks import cases
from hpcdist import collectives
from hpcdist.collectives.tuning import autotune, cache
from hpcdist.collectives.tuning.autotune import CostModel, Tournament, TuningRequest, choose, select, sizes
from hpcdist.collectives.tuning.cost_model import NODE, LinkParameters, MachineCosts, Topology
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import MissingCapabilityError

FLOAT = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def of(ranks, max_bytes=4096, ranks_per_node=None, **keys):
    def body(comm):
        return select(comm, comm, TuningRequest(max_bytes=max_bytes, dtype=FLOAT, budget_s=0.1), "threads", **keys)

    return run_threads(ranks, body, ranks_per_node)


@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(2, None), (3, None), (4, 2), (5, 2)])
def test_all_ranks_choose_the_same_by_measuring(ranks, ranks_per_node):
    found = of(ranks, ranks_per_node=ranks_per_node)
    assert all(tuned == found[0] for tuned in found)
    assert found[0].source == "measured"
    assert {4096} <= {row.nbytes for row in found[0].rows} <= {64, 128, 256, 512, 1024, 2048, 4096}
    for row in found[0].rows:
        assert row.chosen == found[0].choice.at(row.nbytes)
        assert {"native", row.chosen} <= set(row.measured)
    if ranks_per_node is not None:
        assert all("node_shared" not in row.measured for row in found[0].rows), "it needs one node"


def test_ranks_agree_whatever_their_clocks_say():
    tick = itertools.count()
    own = threading.local()

    def clock():
        """Clocks that run at different speeds, forward by random steps, a rank's own."""
        if not hasattr(own, "time"):
            own.speed = 10.0 ** next(tick) * 1e-6
            own.random = np.random.default_rng(next(tick))
            own.time = 0.0
        own.time += own.speed * own.random.random()
        return own.time

    found = of(4, clock=clock)
    assert all(tuned == found[0] for tuned in found)


def test_alone_there_is_nothing_to_choose():
    assert [(tuned.text, tuned.source, tuned.rows) for tuned in of(1)] == [("native", "default", ())]


def test_a_second_start_takes_what_the_first_measured():
    first, second, third = of(2), of(2), of(2, cached=False)
    assert (first[0].source, second[0].source, third[0].source) == ("measured", "cache", "measured")
    assert second[0].text == first[0].text and second[0].rows == first[0].rows
    assert of(2, renewed=True)[0].source == "measured", "asked for"
    assert of(3)[0].source == "measured", "other ranks, another choice"
    assert of(2, max_bytes=8192)[0].source == "measured"


def test_the_load_of_the_busiest_node_counts(monkeypatch):
    loads = iter([0.1, 0.7, *[0.1] * 4])
    monkeypatch.setattr(cache, "load_per_processor", lambda: next(loads))
    busy, idle, after = of(2), of(2), of(2)
    assert [found[0].source for found in (busy, idle, after)] == ["measured", "measured", "cache"]
    assert busy[0].load == 0.7 and "beside other work" in idle[0].note


def test_a_kept_choice_that_cannot_run_is_made_anew(tmp_path):
    def body(comm):
        return select(comm, comm, TuningRequest(max_bytes=64, dtype=FLOAT, kind="sharded", budget_s=0.1), "threads")

    run_threads(2, body)
    (file,) = (tmp_path / "hpcdist" / "tuning").iterdir()
    forged = json.loads(file.read_text()) | {"text": "recursive_doubling"}  # an allreduce that has no halves
    file.write_text(json.dumps(forged))
    found = run_threads(2, body)[0]
    assert (found.source, found.text in collectives.SHARDED) == ("measured", True)


def test_where_nothing_can_be_kept_the_run_goes_on(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = of(2)
    assert found[0].source == "measured"
    assert "not kept" in found[0].note


def test_several_groups_that_measure_at_once_agree():
    def body(comm):
        pair = comm.split(comm.rank // 2)
        assert pair is not None
        first = select(pair, comm, TuningRequest(max_bytes=1024, dtype=FLOAT, budget_s=0.1), "threads")
        return first, select(pair, comm, TuningRequest(max_bytes=1024, dtype=FLOAT), "threads")

    found = run_threads(4, body)
    assert all(pair == found[0] for pair in found)
    assert [tuned.source for tuned in found[0]] == ["measured", "cache"]


def test_sharding_has_one_algorithm_for_all_sizes():
    def body(comm):
        wanted = TuningRequest(max_bytes=4096, dtype=FLOAT, kind="sharded", budget_s=0.1)
        return select(comm, comm, wanted, "threads")

    found = run_threads(4, body, 2)
    assert found[0].text in collectives.SHARDED
    assert all(tuned == found[0] for tuned in found)


def test_on_one_node_an_algorithm_between_nodes_is_not_measured():
    assert not any("hierarchical" in row.measured for row in of(4)[0].rows)
    names = ("hierarchical", "node_shared", "ring")
    assert [autotune.differs_on(1, name) for name in names] == [False, True, True]
    assert [autotune.differs_on(2, name) for name in names] == [True, False, True]
    assert autotune.usable("hierarchical", autotune.ALLREDUCE_KIND, 1), "a checkpoint may have it"


def test_a_table_serves_smaller_buffers_and_no_larger_ones():
    assert of(2, 4096)[0].source == "measured"
    assert [of(2, size)[0].source for size in (4096, 1024, 64)] == ["cache"] * 3
    larger = of(2, 8192)[0]
    assert larger.source == "measured" and "reaches 4096 bytes, and this job has buffers of 8192" in larger.note
    assert of(2, 4096)[0].source == "cache"


def test_sizes_end_with_the_greatest():
    assert sizes(1) == [1]
    assert sizes(64) == [64]
    assert sizes(100) == [100]
    assert sizes(128) == [64, 128]
    assert sizes(5000) == [64, 256, 1024, 5000]


@cases(
    "measured, before, chosen",
    ({"native": 1.0, "ring": 0.5}, None, "ring"),
    ({"native": 1.0, "ring": 0.96}, None, "native"),  # not clearly faster
    ({"native": 1.0, "ring": 0.5, "circulant": 0.51}, "circulant", "circulant"),  # about as fast: no change
    ({"native": 1.0, "ring": 0.5, "circulant": 0.6}, "circulant", "ring"),
    ({"native": 1.0, "ring": 0.5}, "rabenseifner", "ring"),  # dropped from the race
    ({"native": 1.0, "ring": 0.94, "circulant": 0.97}, "circulant", "native"),
)
def test_nothing_displaces_the_mpi_library_unless_clearly_faster(measured, before, chosen):
    assert choose(measured, before) == chosen


class Course:
    """Candidates that take the time they are told, by a clock that only they move."""

    def __init__(self, seconds):
        self.seconds, self.now, self.calls = seconds, 0.0, dict.fromkeys(seconds, 0)

    def clock(self):
        return self.now

    def call(self, name):
        self.calls[name] += 1
        self.now += self.seconds[name]

    def race(self, comm, share_s, kept="native"):
        calls = {name: lambda name=name: self.call(name) for name in self.seconds}
        return Tournament(comm, comm, calls, self.clock).run(share_s, kept)


def test_the_time_is_that_of_the_slowest_rank():
    def body(comm):
        return Course({"native": 1.0 + comm.rank, "ring": 3.5 - comm.rank}).race(comm, 100.0)

    for found in run_threads(3, body):
        assert found == pytest.approx({"native": 3.0, "ring": 3.5})


def test_hopeless_candidates_are_dropped_early_and_the_share_is_kept():
    def body(comm):
        course = Course({"native": 9.0, "ring": 1.0, "double_tree": 2.5})
        return course.race(comm, 150.0), course.calls, course.now

    found, calls, spent_s = run_threads(2, body)[0]
    assert found == pytest.approx({"native": 9.0, "ring": 1.0}), "native stays"
    assert calls["double_tree"] == 3
    assert calls["native"] == calls["ring"] > 6
    assert spent_s <= 150.0 + 12.5, "the first calls are not part of the share"


def test_a_race_whose_time_is_up_has_a_result_all_the_same():
    def body(comm):
        course = Course({"native": 9.0, "ring": 1.0, "double_tree": 2.5})
        return course.race(comm, 0.0), course.now

    found, spent_s = run_threads(2, body)[0]
    assert found == pytest.approx({"native": 9.0, "ring": 1.0, "double_tree": 2.5})
    assert spent_s == pytest.approx(3 * 12.5)


def test_what_one_rank_cannot_run_nobody_runs():
    def body(comm):
        def refuse():
            if comm.rank == 1:
                raise MissingCapabilityError("not here")

        return Tournament(comm, comm, {"native": lambda: None, "ring": refuse}, time.perf_counter).run(0.01, "native")

    assert [set(found) for found in run_threads(2, body)] == [{"native"}] * 2


def test_other_failures_are_not_swallowed():
    def fail():
        raise OSError("a bug")

    with pytest.raises(OSError, match="a bug"):
        run_threads(1, lambda comm: Tournament(comm, comm, {"native": fail}, time.perf_counter).run(0.01, "native"))


def test_the_budget_holds_where_every_call_is_slow():
    """A clock on which each look at it takes a tenth of a second: after the first race, time is up."""
    own = threading.local()

    def clock():
        own.time = getattr(own, "time", 0.0) + 0.1
        return own.time

    found = of(2, max_bytes=1 << 20, clock=clock)[0]
    assert [row.nbytes for row in found.rows] == [1 << 20], "the size that matters most is always looked at"
    assert found.text == found.rows[0].chosen


def test_16_bit_floats_travel_as_they_are_or_widened():
    machine = MachineCosts({NODE: LinkParameters(0.0, 1e-9)}, 0.0)
    narrow = CostModel(Topology((4,)), machine, np.dtype(np.float16)).predicted(1 << 20)
    wide = CostModel(Topology((4,)), machine, np.dtype(np.float32)).predicted(1 << 20)
    assert narrow["ring"] == pytest.approx(2 * wide["ring"])
    assert narrow["all_to_all"] == pytest.approx(wide["all_to_all"])


def test_the_cache_is_where_the_system_says(tmp_path):
    of(2)
    assert len(os.listdir(tmp_path / "hpcdist" / "tuning")) == 1
