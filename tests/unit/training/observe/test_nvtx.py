"""Profiler ranges nest, are balanced even if an operation raises, and cost nothing if they are disabled."""

import os
import subprocess
import sys
from types import ModuleType

import pytest

from harness.jobs import LIMIT_S
from hpcdist.errors import MissingCapabilityError
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.schedule.step import NO_RANGES, in_range
from hpcdist.training.observe.instrumentation import COLORS, NvtxRanges, label
from stubs import nvtx_tool


class Recorded:
    """A double of the module that records pushes and pops."""

    def __init__(self):
        self.calls = []
        self.made = []

    def module(self):
        recorded = self

        class annotate:  # noqa: N801 - the name in the module
            def __init__(self, message, color=None, domain=None, category=None):
                self.message = message
                recorded.made.append({"message": message, "color": color, "domain": domain, "category": category})

            def __enter__(self):
                recorded.calls.append(f"push {self.message}")
                return self

            def __exit__(self, *exception):
                recorded.calls.append("pop")
                return False

        made = ModuleType("nvtx")
        made.annotate = annotate
        return made


@pytest.fixture
def recorded_ranges(monkeypatch):
    result = Recorded()
    monkeypatch.setitem(sys.modules, "nvtx", result.module())
    return result


def test_operations_are_nested_in_the_range_of_the_step(recorded_ranges):
    ranges = NvtxRanges()
    seen = []
    handler = in_range(ranges, "compute", lambda op: seen.append(len(recorded_ranges.calls)))
    with ranges("step", "step"):
        handler(Operation(Kind.FORWARD, 0, 3))
        handler(Operation(Kind.BACKWARD, 0, 3))
    assert recorded_ranges.calls == [
        "push step", "push FORWARD microbatch 0 unit 3", "pop", "push BACKWARD microbatch 0 unit 3", "pop", "pop",
    ]  # fmt: skip
    assert seen == [2, 4]  # each was called inside its own range


def test_operation_that_raises_leaves_no_open_range(recorded_ranges):
    def raise_arithmetic_error(op):
        raise ArithmeticError("no number")

    ranges = NvtxRanges()
    with pytest.raises(ArithmeticError, match="no number"), ranges("step", "step"):
        in_range(ranges, "communication", raise_arithmetic_error)(Operation(Kind.AGREE))
    assert recorded_ranges.calls == ["push step", "push AGREE", "pop", "pop"]


def test_each_text_is_registered_once_for_all_steps(recorded_ranges):
    handler = in_range(NvtxRanges(), "update", lambda op: None)
    for _ in range(5):
        handler(Operation(Kind.APPLY))
    assert recorded_ranges.made == [
        {"message": "APPLY", "color": COLORS["update"], "domain": "hpcdist", "category": "update"}
    ]
    assert recorded_ranges.calls == ["push APPLY", "pop"] * 5


def test_every_phase_of_spans_has_a_color():
    from hpcdist.comm.record.spans import PHASES

    assert set(COLORS) == set(PHASES)
    assert len(set(COLORS.values())) == len(COLORS)


def test_range_labels():
    assert label("REDUCE") == "REDUCE"
    assert label("GATHER", unit=0) == "GATHER unit 0"
    assert label("FORWARD", 2, 7) == "FORWARD microbatch 2 unit 7"


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(MissingCapabilityError, match=r"hpcdist\[trace\].*telemetry.nvtx = false"):
        NvtxRanges()


def test_disabled_ranges_pass_operations_and_errors_through():
    seen = []
    in_range(NO_RANGES, "compute", seen.append)(Operation(Kind.FORWARD, 1, 2))
    assert seen == [Operation(Kind.FORWARD, 1, 2)]
    with pytest.raises(KeyError), NO_RANGES("step", "step"), NO_RANGES("data", "wait for data"):
        raise KeyError


def test_real_package_accepts_every_phase_without_a_tool():
    pytest.importorskip("nvtx")
    ranges = NvtxRanges()
    for _ in range(2):  # made, then known
        for phase in COLORS:
            with ranges("step", "step"), ranges(phase, "work", 0, 1):
                pass
    with pytest.raises(ArithmeticError), ranges("compute", "FORWARD"):
        raise ArithmeticError
    with ranges("compute", "FORWARD"):  # it can be entered again
        pass


def test_profiling_tool_sees_the_ranges(tmp_path):
    code = """
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.schedule.step import in_range
from hpcdist.training.observe.instrumentation import NvtxRanges
ranges = NvtxRanges()

def handler(op):
    if op.kind is Kind.REDUCE:
        raise ArithmeticError

for step in range(2):
    try:
        with ranges("step", "step"):
            in_range(ranges, "compute", handler)(Operation(Kind.FORWARD, 0, 3))
            in_range(ranges, "communication", handler)(Operation(Kind.REDUCE))
    except ArithmeticError:
        pass
"""
    variables = os.environ | nvtx_tool.environment(tmp_path)
    subprocess.run([sys.executable, "-c", code], env=variables, check=True, timeout=LIMIT_S)
    (result,) = nvtx_tool.ranges(tmp_path).values()
    assert result == [(0, "step"), (1, "FORWARD microbatch 0 unit 3"), (1, "REDUCE")] * 2
