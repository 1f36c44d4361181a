"""Bytes per parameter: table 1 of the ZeRO paper, and the rules of other strategies."""

import pytest

from harness.marks import cases
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.memory.model_states import states, unsharded

# arXiv:1910.02054, table 1: GB on a device with stages 1, 2 and 3; by parameters in units of 1e9, and data ranks.
TABLE = {
    (7.5, 1): ("120", "120", "120"),
    (7.5, 4): ("52.5", "41.3", "30"),
    (7.5, 16): ("35.6", "21.6", "7.5"),
    (7.5, 64): ("31.4", "16.6", "1.88"),
    (7.5, 256): ("30.4", "15.4", "0.47"),
    (7.5, 1024): ("30.1", "15.1", "0.12"),
    (128, 1): ("2048", "2048", "2048"),
    (128, 4): ("896", "704", "512"),
    (128, 16): ("608", "368", "128"),
    (128, 64): ("536", "284", "32"),
    (128, 256): ("518", "263", "8"),
    (128, 1024): ("513", "257", "2"),
    (1000, 1): ("16000", "16000", "16000"),
    (1000, 4): ("7000", "5500", "4000"),
    (1000, 16): ("4750", "2875", "1000"),
    (1000, 64): ("4187", "2218", "250"),
    (1000, 256): ("4046", "2054", "62.5"),
    (1000, 1024): ("4011", "2013", "15.6"),
}


@pytest.mark.parametrize("implementation", ["hpcdist", "megatron-2022"])
@pytest.mark.parametrize(("model", "printed"), TABLE.items())
def test_states_match_table_1_of_the_zero_paper(implementation, model, printed):
    billions, ranks = model
    for stage, text in enumerate(printed, start=1):
        layout = ParallelLayout(
            data=ranks, strategy=f"zero{stage}", main_gradients="working", implementation=implementation
        )
        size = billions * states(layout).total
        # Rounded with a decimal point, cut off without one.
        shown = f"{size + 1e-9:.{len(text.partition('.')[2])}f}" if "." in text else str(int(size))
        assert shown == text, (stage, size)


@pytest.mark.parametrize("ranks", [1, 2, 8, 384])
@cases(
    "keys, rest, cut",
    ({"main_gradients": "float32", "implementation": "megatron-2022"}, 18, 0),
    ({"main_gradients": "float32", "implementation": "megatron-2022", "strategy": "zero1"}, 6, 12),
    ({"main_gradients": "float32", "implementation": "megatron-2022", "strategy": "zero2"}, 2, 16),
    ({"main_gradients": "float32", "implementation": "megatron-2022", "strategy": "zero3"}, 0, 18),
    ({"main_gradients": "working", "implementation": "megatron-2022"}, 16, 0),
    ({"precision": "float32"}, 16, 0),
    ({"precision": "float32", "strategy": "zero1"}, 8, 8),
    ({"precision": "float32", "strategy": "zero2"}, 4, 12),
    ({"precision": "float32", "strategy": "zero3"}, 0, 16),
    ({"precision": "float64", "strategy": "zero1"}, 16, 16),
    ({"precision": "float32", "optimizer_slots": 1}, 12, 0),
    ({"precision": "float16", "optimizer_slots": 0, "strategy": "zero1"}, 4, 4),
    ({"precision": "float32", "strategy": "parameter_server"}, 8, 8),
    ({"precision": "bfloat16", "strategy": "parameter_server", "servers": 3}, 4, 0),
)
def test_bytes_per_parameter_of_each_strategy(ranks, keys, rest, cut):
    assert states(ParallelLayout(data=ranks, **keys)).total == pytest.approx(rest + cut / ranks, rel=1e-15)


def test_context_axis_shards_the_states_too():
    layout = ParallelLayout(data=4, context=8, strategy="zero1", implementation="megatron-2022")
    assert states(layout).total == 6 + 12 / 32


def test_expert_states_are_sharded_over_fewer_ranks():
    layout = ParallelLayout(data=16, expert=8, strategy="zero1", implementation="megatron-2022")
    assert states(layout).total == 6 + 12 / 16
    assert states(layout, experts=True).total == 6 + 12 / 2


def test_rule_text_names_the_formula_and_its_source():
    zero = states(ParallelLayout(data=64, strategy="zero1", implementation="megatron-2022")).rule
    assert zero == (
        "6 + 12/d = 6.188 bytes per parameter, d = 64 (bfloat16: parameter 2, gradient 4, optimizer 12; ZeRO 1, "
        "arXiv:1910.02054)"
    )
    assert states(ParallelLayout(precision="float32")).rule.startswith(
        "16 bytes per parameter (float32: parameter 4, gradient 4"
    )
    assert "14/d" in states(ParallelLayout(data=2, strategy="zero2")).rule
    assert states(ParallelLayout(data=2, strategy="zero3")).rule.startswith("16/d = 8 bytes")
    served = states(ParallelLayout(data=4, strategy="parameter_server", servers=2)).rule
    assert served.startswith("worker 2 + 2, server 2 + 2 + 12 of its 1/2")


def test_16_bit_gradients_of_hpcdist_take_2_bytes():
    ours, theirs = (unsharded(ParallelLayout(implementation=name)) for name in ("hpcdist", "megatron-2022"))
    assert (ours.gradient, theirs.gradient) == (2, 4)


@pytest.mark.parametrize(
    ("compression", "precision", "owed"),
    [("int8", "float32", 4), ("topk", "bfloat16", 8), ("onebit", "float32", 4 + 4 / 8), ("none", "bfloat16", 0)],
)
def test_compression_adds_residuals_to_the_states(compression, precision, owed):
    layout = ParallelLayout(data=8, strategy="zero1", precision=precision, compression=compression)
    with_it, without = states(layout), states(ParallelLayout(data=8, strategy="zero1", precision=precision))
    assert with_it.total - without.total == pytest.approx(owed)
    assert with_it.rule == without.rule + (f", and {owed:.4g} for the residuals of {compression}" if owed else "")
