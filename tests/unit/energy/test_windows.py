"""Phase windows: the innermost window gets the joules, nothing is counted twice, and a failed read is not zero."""

import math

import pytest

from hpcdist.energy.node_rows import PhaseWindows

S = 1_000_000_000


def joules(windows):
    return {name: phase["mj"] for name, phase in windows.phases().items()}


def test_nested_windows_are_exclusive():
    windows = PhaseWindows(2)
    windows.enter("training", 0, [100, 10])
    windows.enter("checkpoint", 4 * S, [150, 11])
    windows.leave(5 * S, [170, 13])
    windows.enter("checkpoint", 7 * S, [190, 17])
    windows.leave(10 * S, [191, 25])
    windows.leave(11 * S, [200, 41])
    windows.enter("validation", 20 * S, [500, 100])  # the time between the windows is not counted
    windows.leave(21 * S, [510, 101])
    assert joules(windows) == {"training": [79, 21], "checkpoint": [21, 10], "validation": [10, 1]}
    assert windows.totals() == [110, 32]
    phases = windows.phases()
    assert [(phases[name]["seconds"], phases[name]["windows"]) for name in ("training", "checkpoint")] == [
        (7, 1),
        (4, 2),
    ]
    assert phases["checkpoint"]["shortest_s"] == 1
    first = windows.take()[0]
    assert (first.begin_ns, first.end_ns) == (4 * S, 5 * S)


def test_random_windows_sum_to_the_total(rng):
    windows, total, value, now_ns, depth = PhaseWindows(1), 0, 1000, 0, 0
    for _ in range(500):
        step = int(rng.integers(0, 100))
        now_ns += int(rng.integers(1, 10**9))
        value += step
        total += step if depth else 0
        if depth and rng.random() < 0.5:
            windows.leave(now_ns, [value])
            depth -= 1
        else:
            windows.enter(f"phase {rng.integers(3)}", now_ns, [value])
            depth += 1
    assert windows.totals() == [total]
    assert sum(mj[0] for mj in joules(windows).values()) == total


def test_open_window_counts_to_last_edge_without_shortest_time():
    windows = PhaseWindows(1)
    windows.enter("training", 0, [0])
    windows.edge(2 * S, [7])
    phase = windows.phases()["training"]
    assert (phase["mj"], phase["seconds"], phase["shortest_s"]) == ([7], 2, math.inf)


def test_failed_edge_makes_both_windows_nan_but_not_the_total():
    windows = PhaseWindows(2)
    windows.enter("training", 0, [0, 0])
    windows.enter("checkpoint", S, [None, 5])
    windows.leave(2 * S, [30, 6])
    windows.leave(3 * S, [40, 7])
    result = joules(windows)
    assert math.isnan(result["training"][0]) and math.isnan(result["checkpoint"][0])
    assert (result["training"][1], result["checkpoint"][1]) == (6, 1)
    assert windows.totals() == [40, 7]


@pytest.mark.parametrize("edges", [[None, 9], [3, None], [None, None]])
def test_failure_at_first_or_last_edge_has_no_total(edges):
    windows = PhaseWindows(1)
    windows.enter("training", 0, [edges[0]])
    windows.leave(S, [edges[1]])
    assert math.isnan(windows.totals()[0]) and math.isnan(joules(windows)["training"][0])


def test_failure_outside_of_windows_has_no_effect():
    windows = PhaseWindows(1)
    windows.enter("training", 0, [0])
    windows.leave(S, [5])
    windows.edge(2 * S, [None])
    windows.enter("validation", 3 * S, [50])
    windows.leave(4 * S, [51])
    assert windows.totals() == [6] and joules(windows) == {"training": [5], "validation": [1]}


def test_failure_at_end_of_outermost_window_has_no_total():
    windows = PhaseWindows(1)
    windows.enter("training", 0, [0])
    windows.leave(S, [None])  # the share of training in the next interval is unknown
    windows.enter("validation", 3 * S, [50])
    windows.leave(4 * S, [51])
    result = joules(windows)
    assert math.isnan(windows.totals()[0]) and math.isnan(result["training"][0]) and result["validation"] == [1]


def test_forgotten_interval_of_a_source_has_no_total():
    windows = PhaseWindows(2)
    windows.enter("training", 0, [0, 0])
    windows.edge(S, [5, 5])
    windows.forget(1)
    windows.enter("checkpoint", 2 * S, [9, 9])
    windows.leave(3 * S, [10, 10])
    windows.leave(4 * S, [20, 20])
    result = joules(windows)
    assert result["checkpoint"] == [1, 1] and result["training"][0] == 19
    assert math.isnan(result["training"][1]) and math.isnan(windows.totals()[1]) and windows.totals()[0] == 20


def test_taken_windows_free_memory_and_still_count():
    windows, taken = PhaseWindows(1), []
    windows.enter("training", 0, [0])
    for number in range(10_000):
        windows.enter("checkpoint", 10 * number * S, [10 * number])
        windows.leave((10 * number + 1) * S, [10 * number + 3])
        if number % 100 == 99:
            taken += windows.take()
            assert not windows.closed and windows.phases()["checkpoint"]["windows"] == number + 1
    assert len(taken) == 10_000 and not windows.take()
    phase = windows.phases()["checkpoint"]
    assert (phase["mj"], phase["seconds"], phase["shortest_s"]) == ([30_000], 10_000, 1)
    assert windows.phases()["training"]["windows"] == 1 and windows.phases() == windows.phases()  # pure
