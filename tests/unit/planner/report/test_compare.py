"""Differences of layouts add up, and the text names the faster layout and the reason."""

from dataclasses import replace

import pytest

from hpcdist.planner.cluster import toml_file
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model.description import TransformerShape
from hpcdist.planner.model.transformer import describe
from hpcdist.planner.plan import plan
from hpcdist.planner.report.quantities import changes, differences, slowdown_line

CLUSTER = toml_file.read("a100-selene")
MODEL = describe(
    TransformerShape(layers=24, hidden=2304, heads=24, vocabulary=51200, context=2048, dropout=0.1),
    "Megatron-LM's 1.7 billion",
)
WIDE = ParallelLayout(data=32, microbatch=16, recompute="full", implementation="megatron-2022")
CUT = replace(WIDE, data=4, tensor=8, microbatch=8)


def test_differences_add_up_to_the_difference():
    one, other = (plan(MODEL, layout, CLUSTER, 512, 1) for layout in (WIDE, CUT))
    result = differences(one.timing.terms, other.timing.terms)
    assert sum(more for _, more in result) == pytest.approx(one.step_s - other.step_s)
    assert [abs(more) for _, more in result] == sorted((abs(more) for _, more in result), reverse=True)
    assert {"tensor", "forward"} <= {name for name, _ in result}
    memory = differences(one.memory.terms, other.memory.terms)
    assert sum(more for _, more in memory) == pytest.approx(one.memory.bytes - other.memory.bytes)


def test_slowdown_line_names_the_faster_layout_and_the_reason():
    one, other = (plan(MODEL, layout, CLUSTER, 512, 1) for layout in (WIDE, CUT))
    fast, slow = sorted((one, other), key=lambda each: each.step_s)
    assert "faster" in slowdown_line(fast, slow)
    assert "slower" in slowdown_line(slow, fast)
    assert "of tensor" in slowdown_line(one, other)
    assert slowdown_line(one, one) == "as fast"
    assert changes(WIDE, CUT) == "data 32 instead of 4, tensor 1 instead of 8, microbatch 16 instead of 8"
    assert changes(WIDE, WIDE) == ""
