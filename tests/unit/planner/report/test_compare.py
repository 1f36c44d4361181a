"""Layouts side by side: differences add up, impossible ones say why, and the fastest is named."""

from dataclasses import replace

import pytest

from hpcdist.errors import UsageError
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model.description import TransformerShape
from hpcdist.planner.model.transformer import describe
from hpcdist.planner.plan import plan
from hpcdist.planner.report.compare import changes, compare, differences, slowdown_line

CLUSTER = toml_file.read("a100-selene")
MODEL = describe(
    TransformerShape(layers=24, hidden=2304, heads=24, vocabulary=51200, context=2048, dropout=0.1),
    "Megatron-LM's 1.7 billion",
)
WIDE = ParallelLayout(data=32, microbatch=16, recompute="full", implementation="megatron")
CUT = replace(WIDE, data=4, tensor=8, microbatch=8)


def test_rows_are_plans_and_the_best_is_the_fastest():
    found = compare(MODEL, [CUT, WIDE], CLUSTER, 512, 100)
    estimates = [plan(MODEL, layout, CLUSTER, 512, 100) for layout in (CUT, WIDE)]
    assert [row.estimate.timing for row in found.rows] == [one.timing for one in estimates]
    assert [row.problems for row in found.rows] == [(), ()]
    assert found.best == min((one.step_s, number) for number, one in enumerate(estimates))[1]


def test_differences_add_up_to_the_difference():
    one, other = (plan(MODEL, layout, CLUSTER, 512, 1) for layout in (WIDE, CUT))
    found = differences(one.timing.terms, other.timing.terms)
    assert sum(more for _, more in found) == pytest.approx(one.step_s - other.step_s)
    assert [abs(more) for _, more in found] == sorted((abs(more) for _, more in found), reverse=True)
    assert {"tensor", "forward"} <= {name for name, _ in found}
    memory = differences(one.memory.terms, other.memory.terms)
    assert sum(more for _, more in memory) == pytest.approx(one.memory.bytes - other.memory.bytes)


def test_words_say_which_is_faster_and_why():
    one, other = (plan(MODEL, layout, CLUSTER, 512, 1) for layout in (WIDE, CUT))
    fast, slow = sorted((one, other), key=lambda each: each.step_s)
    assert "faster" in slowdown_line(fast, slow)
    assert "slower" in slowdown_line(slow, fast)
    assert "of tensor" in slowdown_line(one, other)
    assert slowdown_line(one, one) == "as fast"
    assert changes(WIDE, CUT) == "data 32 instead of 4, tensor 1 instead of 8, microbatch 16 instead of 8"
    assert changes(WIDE, WIDE) == ""


def test_an_impossible_layout_has_its_reasons_and_no_estimate():
    found = compare(MODEL, [replace(WIDE, data=2, tensor=7), WIDE], CLUSTER, 512)
    assert found.rows[0].estimate is None
    assert any("7" in text and "24 heads" in text for text in found.rows[0].problems)
    assert found.best == 1
    text = "\n".join(found.table())
    assert "1: tensor = 7 does not divide the 24 heads" in text


def test_a_layout_that_is_too_large_is_estimated_and_not_the_best():
    large = replace(WIDE, microbatch=16, recompute="none")
    found = compare(MODEL, [large, CUT], CLUSTER, 512)
    assert found.rows[0].estimate is not None
    assert found.rows[0].problems[0].endswith("on stage 0")
    assert "GB too much" in found.rows[0].problems[0]
    assert found.best == 1
    assert compare(MODEL, [large], CLUSTER, 512).best is None


def test_the_table_has_a_column_for_each():
    lines = compare(MODEL, [WIDE, CUT, replace(CUT, tensor=4, data=8)], CLUSTER, 512).table()
    heads = {line.split("  ")[0]: line for line in lines}
    assert heads["data"].split()[1:] == ["32", "4", "8"]
    assert heads["tensor"].split()[1:] == ["1", "8", "4"]
    assert "pipeline" not in heads, "it is the same in all of them"
    assert {"step", "memory", "MFU", "HFU"} <= set(heads)
    assert sum(" against " in line for line in lines) == 2


def test_no_layouts():
    with pytest.raises(UsageError, match="no layouts"):
        compare(MODEL, [], CLUSTER, 512)
