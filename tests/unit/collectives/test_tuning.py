"""Tuning by measurement on threads. Tests that depend on times use a fake clock."""

import itertools
import json
import os
import threading
import time

import numpy as np
import pytest

from harness.marks import cases
from hpcdist import collectives
from hpcdist.collectives import autotune, tuning_cache
from hpcdist.collectives.autotune import CostModel, SizeSweep, Tournament, TuningRequest, choose, select, sizes
from hpcdist.collectives.cost_model import NODE, LinkParameters, MachineCosts, Topology
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import MissingCapabilityError

FLOAT = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def temporary_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def tune(ranks, max_bytes=4096, ranks_per_node=None, **keys):
    def body(comm):
        return select(comm, comm, TuningRequest(max_bytes=max_bytes, dtype=FLOAT, budget_s=0.1), "threads", **keys)

    return run_threads(ranks, body, ranks_per_node)


@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(2, None), (3, None), (4, 2), (5, 2)])
def test_all_ranks_choose_the_same_table(ranks, ranks_per_node):
    result = tune(ranks, ranks_per_node=ranks_per_node)
    assert all(tuned == result[0] for tuned in result)
    assert result[0].source == "measured"
    assert {4096} <= {row.nbytes for row in result[0].rows} <= {64, 128, 256, 512, 1024, 2048, 4096}
    for row in result[0].rows:
        assert row.chosen == result[0].choice.at(row.nbytes)
        assert {"native", row.chosen} <= set(row.measured)
    if ranks_per_node is not None:
        assert all("node_shared" not in row.measured for row in result[0].rows), "node_shared needs one node"


def test_ranks_agree_with_different_clocks():
    tick = itertools.count()
    local_data = threading.local()

    def clock():
        """Return the time of a rank's own clock, which has a random speed and random steps."""
        if not hasattr(local_data, "time"):
            local_data.speed = 10.0 ** next(tick) * 1e-6
            local_data.random = np.random.default_rng(next(tick))
            local_data.time = 0.0
        local_data.time += local_data.speed * local_data.random.random()
        return local_data.time

    result = tune(4, clock=clock)
    assert all(tuned == result[0] for tuned in result)


def test_one_rank_uses_the_default():
    assert [(tuned.text, tuned.source, tuned.rows) for tuned in tune(1)] == [("native", "default", ())]


def test_second_start_uses_the_cached_measurement():
    first, second, third = tune(2), tune(2), tune(2, cached=False)
    assert (first[0].source, second[0].source, third[0].source) == ("measured", "cache", "measured")
    assert second[0].text == first[0].text and second[0].rows == first[0].rows
    assert tune(2, renewed=True)[0].source == "measured", "renewed=True must measure again"
    assert tune(3)[0].source == "measured", "another number of ranks must measure again"
    assert tune(2, max_bytes=8192)[0].source == "measured"


def test_load_of_the_busiest_node_is_recorded(monkeypatch):
    loads = iter([0.1, 0.7, *[0.1] * 4])
    monkeypatch.setattr(tuning_cache, "load_per_processor", lambda: next(loads))
    busy, idle, after = tune(2), tune(2), tune(2)
    assert [result[0].source for result in (busy, idle, after)] == ["measured", "measured", "cache"]
    assert busy[0].load == 0.7 and "on a busy machine" in idle[0].note


def test_cached_choice_that_cannot_run_is_measured_again(tmp_path):
    def body(comm):
        return select(comm, comm, TuningRequest(max_bytes=64, dtype=FLOAT, kind="sharded", budget_s=0.1), "threads")

    run_threads(2, body)
    (file,) = (tmp_path / "hpcdist" / "tuning").iterdir()
    forged = json.loads(file.read_text()) | {"text": "recursive_doubling"}  # an allreduce algorithm without halves
    file.write_text(json.dumps(forged))
    result = run_threads(2, body)[0]
    assert (result.source, result.text in collectives.SHARDED) == ("measured", True)


def test_tuning_continues_without_a_writable_cache(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    result = tune(2)
    assert result[0].source == "measured"
    assert "not kept" in result[0].note


def test_groups_that_measure_concurrently_agree():
    def body(comm):
        pair = comm.split(comm.rank // 2)
        assert pair is not None
        first = select(pair, comm, TuningRequest(max_bytes=1024, dtype=FLOAT, budget_s=0.1), "threads")
        return first, select(pair, comm, TuningRequest(max_bytes=1024, dtype=FLOAT), "threads")

    results = run_threads(4, body)
    assert all(pair == results[0] for pair in results)
    assert [tuned.source for tuned in results[0]] == ["measured", "cache"]


def test_sharded_tuning_chooses_one_algorithm():
    def body(comm):
        expected = TuningRequest(max_bytes=4096, dtype=FLOAT, kind="sharded", budget_s=0.1)
        return select(comm, comm, expected, "threads")

    results = run_threads(4, body, 2)
    assert results[0].text in collectives.SHARDED
    assert all(tuned == results[0] for tuned in results)


def test_hierarchical_is_not_measured_on_one_node():
    assert not any("hierarchical" in row.measured for row in tune(4)[0].rows)
    names = ("hierarchical", "node_shared", "ring")
    assert [autotune.differs_on(1, name) for name in names] == [False, True, True]
    assert [autotune.differs_on(2, name) for name in names] == [True, False, True]
    assert autotune.usable("hierarchical", autotune.ALLREDUCE_KIND, 1), "a checkpoint may contain it"


def test_cached_table_is_used_for_smaller_buffers_only():
    assert tune(2, 4096)[0].source == "measured"
    assert [tune(2, size)[0].source for size in (4096, 1024, 64)] == ["cache"] * 3
    larger = tune(2, 8192)[0]
    assert larger.source == "measured" and "reaches 4096 bytes, and this job has buffers of 8192" in larger.note
    assert tune(2, 4096)[0].source == "cache"


def test_measured_sizes_end_with_the_largest():
    assert sizes(1) == [1]
    assert sizes(64) == [64]
    assert sizes(100) == [100]
    assert sizes(128) == [64, 128]
    assert sizes(5000) == [64, 256, 1024, 5000]


@cases(
    "measured, before, chosen",
    ({"native": 1.0, "ring": 0.5}, None, "ring"),
    ({"native": 1.0, "ring": 0.96}, None, "native"),  # not clearly faster
    ({"native": 1.0, "ring": 0.5, "circulant": 0.51}, "circulant", "circulant"),  # about as fast, so no change
    ({"native": 1.0, "ring": 0.5, "circulant": 0.6}, "circulant", "ring"),
    ({"native": 1.0, "ring": 0.5}, "rabenseifner", "ring"),  # dropped from the race
    ({"native": 1.0, "ring": 0.94, "circulant": 0.97}, "circulant", "native"),
)
def test_mpi_library_is_replaced_only_if_clearly_slower(measured, before, chosen):
    assert choose(measured, before) == chosen


class Course:
    """Candidates with given times, on a clock that only their calls advance."""

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


def test_measured_time_is_the_slowest_rank():
    def body(comm):
        return Course({"native": 1.0 + comm.rank, "ring": 3.5 - comm.rank}).race(comm, 100.0)

    for result in run_threads(3, body):
        assert result == pytest.approx({"native": 3.0, "ring": 3.5})


def test_slow_candidates_are_dropped_within_the_time_share():
    def body(comm):
        course = Course({"native": 9.0, "ring": 1.0, "double_tree": 2.5})
        return course.race(comm, 150.0), course.calls, course.now

    result, calls, spent_s = run_threads(2, body)[0]
    assert result == pytest.approx({"native": 9.0, "ring": 1.0}), "native must stay"
    assert calls["double_tree"] == 3
    assert calls["native"] == calls["ring"] > 6
    assert spent_s <= 150.0 + 12.5, "the share does not include the first calls"


def test_race_without_time_still_has_a_result():
    def body(comm):
        course = Course({"native": 9.0, "ring": 1.0, "double_tree": 2.5})
        return course.race(comm, 0.0), course.now

    result, spent_s = run_threads(2, body)[0]
    assert result == pytest.approx({"native": 9.0, "ring": 1.0, "double_tree": 2.5})
    assert spent_s == pytest.approx(3 * 12.5)


def test_algorithm_unsupported_on_one_rank_is_not_measured():
    def body(comm):
        def raise_on_rank_1():
            if comm.rank == 1:
                raise MissingCapabilityError("not here")

        return Tournament(comm, comm, {"native": lambda: None, "ring": raise_on_rank_1}, time.perf_counter).run(
            0.01, "native"
        )

    assert [set(result) for result in run_threads(2, body)] == [{"native"}] * 2


def test_other_errors_are_raised():
    def fail():
        raise OSError("a bug")

    with pytest.raises(OSError, match="a bug"):
        run_threads(1, lambda comm: Tournament(comm, comm, {"native": fail}, time.perf_counter).run(0.01, "native"))


def test_budget_limits_slow_measurements():
    """On this clock every reading takes a tenth of a second, so the time is up after the first race."""
    local_data = threading.local()

    def clock():
        local_data.time = getattr(local_data, "time", 0.0) + 0.1
        return local_data.time

    result = tune(2, max_bytes=1 << 20, clock=clock)[0]
    assert [row.nbytes for row in result.rows] == [1 << 20], "the largest size must always be measured"
    assert result.text == result.rows[0].chosen


@pytest.mark.parametrize(("budget_s", "measured"), [(1.3, []), (60.0, [{"ring", "all_to_all", "native"}])])
def test_middle_size_is_measured_with_all_its_candidates_or_not_at_all(budget_s, measured):
    """The fastest algorithms of the two sizes take 0.1 s a call, and native takes 1 s."""

    def body(comm):
        model = CostModel(Topology((comm.size,)), MachineCosts({NODE: LinkParameters(0.0, 1e-9)}, 0.0), FLOAT)
        sweep = SizeSweep(comm, comm, np.zeros(1024, np.float32), model, budget_s, lambda: 0.0)
        sweep.measured = {
            64: {"native": 1.0, "ring": 0.1, "all_to_all": 0.2},
            4096: {"native": 1.0, "ring": 0.2, "all_to_all": 0.1},
        }
        sweep._latest = {"native": (4096, 1.0), "ring": (4096, 0.1), "all_to_all": (4096, 0.1)}
        sweep.measure_between()
        return [set(row.measured) for row in sweep.rows()[1:-1]]

    assert run_threads(2, body) == [measured] * 2


def test_cost_model_knows_widened_16_bit_messages():
    machine = MachineCosts({NODE: LinkParameters(0.0, 1e-9)}, 0.0)
    narrow = CostModel(Topology((4,)), machine, np.dtype(np.float16)).predicted(1 << 20)
    wide = CostModel(Topology((4,)), machine, np.dtype(np.float32)).predicted(1 << 20)
    assert narrow["ring"] == pytest.approx(2 * wide["ring"])
    assert narrow["all_to_all"] == pytest.approx(wide["all_to_all"])


def test_result_is_stored_in_the_cache_directory(tmp_path):
    tune(2)
    assert len(os.listdir(tmp_path / "hpcdist" / "tuning")) == 1
