"""The text of a plan as a reader on a login node sees it."""

import math
from dataclasses import replace

import pytest

from harness.made_plans import CLUSTER, DESCRIPTION, ESTIMATE, GB, MEMORY
from harness.marks import cases
from hpcdist.planner.report import table, text
from hpcdist.planner.report.quantities import (
    bytes_in_both,
    decimal,
    figures,
    grams,
    joules,
    large_count,
    nbytes,
    seconds,
)
from hpcdist.planner.search.best_layouts import RankedLayout, RefusalCount, SearchResult

SHOWN = text.text(ESTIMATE, DESCRIPTION, CLUSTER)


@pytest.mark.parametrize(
    ("value", "output"),
    [(0.0, "0"), (0.001234, "0.00123"), (1.0, "1.00"), (9.999, "10.0"), (123.4, "123"), (12345.0, "12,300")],
)
def test_figures_have_three_digits(value, output):
    assert figures(value) == output


def test_decimal_and_binary_byte_units_are_distinguished():
    assert nbytes(80e9) == "80.0 GB"
    assert bytes_in_both(80 * 2.0**30) == "85.9 GB (80.0 GiB)"
    assert bytes_in_both(80e9) == "80.0 GB (74.5 GiB)"
    assert bytes_in_both(999.0) == "999 B"
    assert bytes_in_both(1.5 * 2.0**20) == "1.57 MB (1.50 MiB)"


@cases(
    "value, output",
    (0.0, "0 s"),
    (3.2e-6, "3.20 us"),
    (0.045, "45.0 ms"),
    (12.34, "12.3 s"),
    (300.0, "5.00 min"),
    (5400.0, "1.50 h"),
    (86400.0 * 14.3, "14.3 days"),
    (365.25 * 86400.0 * 4, "4.00 years"),
    (math.inf, "for ever"),
)
def test_times_are_shown_in_fitting_units(value, output):
    assert seconds(value) == output


def test_other_units_are_formatted():
    assert decimal(312e12, "FLOP/s") == "312 TFLOP/s"
    assert joules(3.6e6) == "3.60 MJ (1.00 kWh)"
    assert joules(20.0) == "20.0 J"
    assert (grams(12.0), grams(3400.0), grams(5.52e8)) == ("12.0 gCO2e", "3.40 kgCO2e", "552 tCO2e")
    assert (large_count(12345), large_count(1.746e11, 4)) == ("12,345", "174.6 billion")


@cases(
    "output",
    "1.000 billion parameters; 512 samples = 512,000 tokens a step",
    "64 = data 4 x pipeline 2 x tensor 8 x context 1: 64 devices on 8 nodes of boxes (8 x card a node)",
    "1f1b over 128 micro-batches of 1 sample, selective recomputation, sequence parallel, bfloat16",
    "fits, 17.9 GB (16.7 GiB) left: at most 68.0 GB (63.3 GiB) of 85.9 GB (80.0 GiB) a device (stage 1)",
    "O optimizer       30.0 GB  44.1 %",
    "rule: 18 bytes a parameter: 2 + 4 + 12",
    "10.0 s, 51,200 tokens/s",
    "backward         4.00 s  40.0 %  ################\n",
    "messages that overlap with computation: 250 ms",
    "MFU 33.3 % (100 TFLOP/s of 300 TFLOP/s a device), HFU 40.0 % (120 TFLOP/s)\n",
    "attention counts all query-key pairs, as in publications; without masked pairs: MFU 30.0 %, HFU 36.7 %\n",
    "bubble: 20.0 % of the time of the longest stage, as in publications: it includes waits for slower stages",
    "a device sends tensor 12.0 GB (ring), data 3.00 GB (hierarchical)",
    "10,000 steps, 5.12 billion tokens: 30.6 h, of which 27.8 h are steps",
    "64 devices: 1,960 device hours; 800 tokens/s a device",
    "a failure every 10.0 h on this many nodes: 3.00 are expected, with 5.00 min for a restart",
    "a checkpoint takes 40.0 s, best every 30.0 min (Young, Daly); saves and failures: 10.0 % more time",
    "3.60 GJ (1.00 MWh) for the run, 360 kJ (100 Wh) a step: devices 69.4 %, hosts 22.2 %, cooling 8.3 %",
    "400 kgCO2e at 400 g/kWh, assumption",
    "price 3,911 EUR",
    "memory: optimizer, 34.9 % of the limit",
    "time: bubble, 20.0 % of a step; shorter with more micro-batches",
    "failures: 9.1 % of the run",
    "flags      the curve is an assumption",
)
def test_text_contains_all_parts_of_a_plan(output):
    assert output in SHOWN


def test_visible_pairs_are_reported_if_they_are_fewer():
    near = replace(ESTIMATE.work, exact_flops=64 * 0.96e15, executed_flops=64 * 1.19e15)
    assert "masked pairs" not in text.text(replace(ESTIMATE, work=near), DESCRIPTION, CLUSTER)
    shown = text.text(replace(ESTIMATE, work=replace(near, executed_flops=64 * 1.1e15)), DESCRIPTION, CLUSTER)
    assert "without masked pairs: MFU 32.0 %, HFU 36.7 %" in shown


@cases(
    "term, changes, output",
    ("activations", {}, "--recompute full, a larger --tensor or a larger --context-ranks"),
    ("activations", {"recompute": "full"}, "a larger --tensor or a larger --context-ranks"),
    ("activations", {"tensor": 1, "recompute": "full", "tokens": 512}, "a larger --tensor"),
    (
        "activations",
        {"microbatch": 2, "sequence_parallel": False, "tokens": 512},
        "--recompute full, a smaller --microbatch, --sequence-parallel or a larger --tensor",
    ),
    ("scratch", {"microbatch": 2, "tokens": 512}, "a smaller --microbatch or a larger --tensor"),
    ("parameters", {"strategy": "zero2"}, "a larger --tensor or --pipeline, or --zero 3"),
    ("parameters", {"strategy": "zero3"}, "a larger --data, --tensor or --pipeline"),
    ("gradients", {"strategy": "zero1"}, "a larger --tensor or --pipeline, or --zero 2 or 3"),
    ("gradients", {"strategy": "zero2"}, "a larger --data, --tensor or --pipeline"),
    ("optimizer", {"strategy": "allreduce"}, "--zero 1, 2 or 3, which shard it over the data ranks"),
    ("optimizer", {"strategy": "zero1"}, "a larger --data, --tensor or --pipeline"),
)
def test_memory_advice_lists_only_unused_options(term, changes, output):
    asked = dict(changes)
    tokens = asked.pop("tokens", ESTIMATE.tokens)
    memory = replace(MEMORY, terms={**MEMORY.terms, term: 60 * GB})
    estimate = replace(ESTIMATE, tokens=tokens, memory=memory, layout=replace(ESTIMATE.layout, **asked))
    assert text.advice_lines(estimate)[0].endswith(f" of the limit; less with {output}")


def test_unused_devices_of_a_node_are_paid_for():
    twelve = replace(ESTIMATE.layout, data=12, pipeline=1, tensor=1)
    shown = text.text(replace(ESTIMATE, layout=twelve), DESCRIPTION, CLUSTER)
    assert "not used" not in SHOWN
    assert "energy and price count 2 whole nodes: 4 of 16 devices are not used" in shown
    seven = replace(twelve, data=7)
    assert "count 1 whole node: 1 of 8 devices is not used" in text.text(
        replace(ESTIMATE, layout=seven), DESCRIPTION, CLUSTER
    )


def test_one_step_is_written_in_the_singular():
    run = replace(ESTIMATE.run, steps=1)
    shown = text.text(replace(ESTIMATE, run=run), DESCRIPTION, CLUSTER)
    assert "1 step, 512,000 tokens: 30.6 h" in shown and "1 steps" not in shown
    assert "for 1 step;" in text.one_line(replace(ESTIMATE, run=run), CLUSTER)


def test_zero_terms_are_not_shown():
    assert "scratch" not in SHOWN and "recompute " not in SHOWN and "network" not in SHOWN


def test_lines_fit_a_terminal():
    assert max(map(len, SHOWN.splitlines())) <= 120


def test_memory_bar_ends_at_the_limit():
    drawn = text.bar(MEMORY)
    assert drawn.startswith("[PPP") and drawn.endswith(".|")
    assert len(drawn) == text.WIDTH + 2
    letters = {letter: drawn.count(letter) for letter in "PGOAMR."}
    for letter, size in zip("PGOAMR", (5, 10, 30, 20, 1, 2), strict=True):
        assert abs(letters[letter] - size * GB / MEMORY.limit_bytes * text.WIDTH) <= 1
    assert letters["."] > 10


def test_excess_memory_is_drawn_after_the_limit():
    short = replace(MEMORY, limit_bytes=34 * GB)
    drawn = text.bar(short)
    within, _, behind = drawn.partition("|")
    assert len(within) - 1 == text.WIDTH // 2 and len(behind) == text.WIDTH // 2
    assert "." not in drawn
    shown = text.text(replace(ESTIMATE, memory=short), DESCRIPTION, CLUSTER)
    assert "DOES NOT FIT, 34.0 GB (31.7 GiB) too much: at most 68.0 GB (63.3 GiB) of 34.0 GB (31.7 GiB)" in shown
    assert text.one_line(replace(ESTIMATE, memory=short), CLUSTER).startswith("DOES NOT FIT: 68.0 GB of 34.0 GB;")


def test_missing_values_are_shown_as_unknown():
    unknown = replace(
        CLUSTER, site=replace(CLUSTER.site, pue=None, carbon_g_per_kwh=None, device_hour_price=None, carbon_source="")
    )
    run = replace(ESTIMATE.run, carbon_g=None, price=None)
    shown = text.text(replace(ESTIMATE, run=run), DESCRIPTION, unknown)
    assert "carbon: unknown, the cluster has no site.carbon_g_per_kwh" in shown
    assert "price: unknown, the cluster has no site.device_hour_price" in shown
    assert "cooling is not counted: the cluster has no site.pue" in shown
    assert "CO2e at" not in shown and "CO2e" not in text.one_line(replace(ESTIMATE, run=run), unknown)


def test_run_that_fails_faster_than_it_saves_never_ends():
    endless = dict.fromkeys(("wall_s", "failures", "slowdown", "joules", "carbon_g", "price"), math.inf)
    result = replace(ESTIMATE, run=replace(ESTIMATE.run, **endless))
    shown = text.text(result, DESCRIPTION, CLUSTER)
    assert "10,000 steps NEVER END: a failure every 10.0 h" in shown
    assert "360 kJ (100 Wh) a step" in shown and "failures: 100.0 % of the run" in shown
    assert "inf" not in shown and "nan" not in shown
    assert (
        text.one_line(result, CLUSTER) == "fits: 68.0 GB of 85.9 GB; 10.0 s a step; for ever for 10,000 steps (boxes)"
    )


@cases(
    "changes, wording",
    ({}, "memory     fits, "),
    ({"memory": replace(MEMORY, limit_bytes=MEMORY.bytes - 3e9)}, "memory     DOES NOT FIT, 3.00 GB too much: "),
    ({"flags": (text.ONE_REPLICA,)}, "(--devices N plans more)"),
    ({"run": replace(ESTIMATE.run, wall_s=math.inf)}, "run        NEVER ENDS: a failure every "),
    ({"step_range_s": (1.0, 3.0)}, " (1.00 s to 3.00 s), "),
    ({"tokens": ESTIMATE.global_batch}, " samples/s, MFU "),
)
def test_plan_summary_has_six_lines(changes, wording):
    shown = text.summary(replace(ESTIMATE, **changes), DESCRIPTION, CLUSTER)
    headings = ["model", "layout", "memory", "step", "run", "notes"]
    assert [line.split()[0] for line in shown.splitlines()] == headings and wording in shown


def test_one_line_summary_of_a_plan():
    assert text.one_line(ESTIMATE, CLUSTER) == (
        "fits: 68.0 GB of 85.9 GB; 10.0 s a step; 30.6 h for 10,000 steps; 3.60 GJ (1.00 MWh); 400 kgCO2e (boxes)"
    )


def test_model_without_tokens_counts_samples():
    shown = text.text(replace(ESTIMATE, tokens=512), replace(DESCRIPTION, tokens=1), CLUSTER)
    assert "512 samples a step" in shown and "10.0 s, 51.2 samples/s" in shown and "tokens" not in shown


def test_comparison_table_shows_relative_speed():
    small = replace(MEMORY, limit_bytes=34 * GB)
    faster = replace(ESTIMATE, timing=replace(ESTIMATE.timing, terms={"forward": 2.0, "backward": 3.0}))
    rows = [("boxes", ESTIMATE), ("cabinets", faster), ("cellars", replace(ESTIMATE, memory=small))]
    lines = table.comparison_table(rows)
    assert "1.00x" in lines[1] and "2.00x" in lines[2] and "68.0 GB!" in lines[3]
    assert lines[4] == "!  does not fit into the memory of a device"
    assert lines[5].startswith("row 2 compared with row 1: 5.00 s (50.0 %) a step faster: 2.00 s less of bubble")
    assert len({len(line.split("  allreduce")[0]) for line in lines[1:4]}) == 1


def test_comparison_of_different_batches_counts_samples():
    half = replace(ESTIMATE, global_batch=256, tokens=256_000)
    lines = table.comparison_table([("boxes", ESTIMATE), ("boxes", half)])
    assert "0.50x" in lines[2] and len(lines) == 3


def test_search_text_shows_the_best_layouts():
    actual = RankedLayout(estimate=ESTIMATE, value=3.5, unit="kWh", why=("better by far",), limits=("memory is full",))
    refused = RefusalCount(limit="heads", count=2000, of="grids", example="tensor = 5 " + "and so on " * 20)
    result = SearchResult(
        objective="energy",
        devices=64,
        global_batch=512,
        found=(actual, actual),
        refused=(refused,),
        layouts=123_456,
        estimated=77,
        left_out=5,
        flags=("closed-form estimates",),
    )
    shown = table.search_table(result, ("of the recipe",))
    for output in ("least energy among 123,456 layouts on 64 devices, 77 of them planned", "energy (kWh)", "3.500"):
        assert output in shown
    assert "\n 1  better by far\n    memory is full\n 2  better by far" in shown
    assert "\n  heads: 2,000 grids, for example: tensor = 5" in shown
    assert "note: closed-form estimates\nnote: of the recipe" in shown
    assert max(len(line) for line in shown.splitlines()) <= 160
    single = replace(result, refused=(replace(refused, count=1),))
    assert "\n  heads: 1 grid, for example" in table.search_table(single)
    assert "layouts on 1 device, 77" in table.search_table(replace(result, devices=1))
    assert "command to plan row 1: hpcdist plan it" in table.search_table(result, replan_command="hpcdist plan it")
    assert "row 1" not in shown
    nothing = replace(result, found=(), nothing=("each needs 10 GB more",))
    assert "no layout fits: each needs 10 GB more" in table.search_table(nothing)
