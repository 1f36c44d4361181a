"""Units of a model: the counts match the models that `hpcdist.models` builds."""

import pytest

from harness.marks import cases
from hpcdist.errors import ConfigurationError
from hpcdist.models import build
from hpcdist.models.config import ModelConfig
from hpcdist.models.counts import counts
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model.description import TransformerShape
from hpcdist.planner.model.stage_split import matrix_flops, step_flops
from hpcdist.planner.model.transformer import describe, inner, of_config

SMALL = {"layers": 3, "hidden": 48, "heads": 6, "vocabulary": 70}
PICTURE = {"height": 9, "width": 8, "channels": 3, "classes": 5}
CASES = [
    (SMALL, {"context": 20}),
    ({**SMALL, "tied": True, "dropout": 0.1}, {"context": 20}),
    (
        {**SMALL, "activation": "swiglu", "positions": "rotary", "norm": "rms", "kv_heads": 2, "bias": False},
        {"context": 80},
    ),
    ({**SMALL, "feed_forward": 100, "kv_heads": 3, "window": 7}, {"context": 20}),
    ({**SMALL, "kind": "encoder"}, {"context": 20}),
    ({"kind": "mlp", "layers": 3, "hidden": 24}, {"features": 10, "classes": 4}),
    ({"kind": "mlp", "layers": 1, "hidden": 24, "dropout": 0.5}, {"features": 10, "classes": 4}),
    ({"kind": "convnet", "layers": 5, "hidden": 4}, PICTURE),
    ({"kind": "convnet", "layers": 2, "hidden": 4, "norm": "rms"}, PICTURE),
]


@pytest.mark.parametrize(("keys", "inputs"), CASES)
def test_counts_match_the_built_models(keys, inputs):
    config = ModelConfig(**keys)
    result, expected = of_config(config, **inputs), counts(config, **inputs)
    assert result.parameters == expected.parameters == build(config, **inputs).layout.parameters
    assert result.stages == len(expected.units)
    assert step_flops(result, ParallelLayout(), 7).exact_flops == 7 * expected.flops


@pytest.mark.parametrize(("keys", "inputs"), CASES[:5])
def test_cut_parameters_match_tensor_parallelism(keys, inputs):
    config = ModelConfig(**keys)
    model = build(config, **inputs)
    cut = [sum(spec.size for spec in stage.tensors() if spec.cut is not None) for stage in model.stages]
    assert [unit.cut_parameters for unit in of_config(config, **inputs).units for _ in range(unit.count)] == cut


def test_equal_units_are_merged():
    units = of_config(ModelConfig(kind="mlp", layers=4, hidden=8), features=8, classes=3).units
    assert [(unit.count, unit.first) for unit in units] == [(1, True), (3, False), (1, False)]


def test_expert_parameters_are_counted():
    numbers = {"layers": 2, "hidden": 32, "heads": 4, "vocabulary": 50, "context": 10}
    dense = describe(TransformerShape(**numbers), "dense").units[1]
    mixed = describe(TransformerShape(**numbers, experts=8, experts_per_token=2), "mixed").units[1]
    feed_forward = 2 * 32 * 128 + 128 + 32
    assert mixed.parameters - dense.parameters == 7 * feed_forward + 32 * 8
    assert mixed.expert_parameters == 8 * feed_forward and dense.expert_parameters == 0
    # A token sees two of them, and the router.
    assert matrix_flops(mixed) - matrix_flops(dense) == 2 * 10 * (2 * 32 * 128 + 32 * 8)


def test_feed_forward_widths_match_a_recipe():
    numbers = {"layers": 1, "hidden": 96, "heads": 4, "vocabulary": 50, "context": 10}
    assert inner(TransformerShape(**numbers)) == 4 * 96
    assert inner(TransformerShape(**numbers, gated=True)) == ModelConfig(hidden=96, activation="swiglu").inner
    assert inner(TransformerShape(**numbers, feed_forward=11)) == 11


@cases(
    "changes, message",
    ({"layers": 0}, "layers of the model is 0"),
    ({"hidden": 30}, "model.hidden = 30 with model.heads = 4"),
    ({"kv_heads": 3}, "model.kv_heads = 3 with model.heads = 4"),
    ({"experts": 2, "experts_per_token": 3}, "experts_per_token of the model is 3"),
    ({"context": -1}, "context of the model is -1"),
    ({"positions": "alibi"}, "model.positions = 'alibi'"),
)
def test_invalid_transformer_shapes_are_rejected(changes, message):
    numbers = {"layers": 2, "hidden": 32, "heads": 4, "vocabulary": 50, "context": 10}
    with pytest.raises(ConfigurationError, match=message):
        describe(TransformerShape(**{**numbers, **changes}), "bad")


def test_missing_model_sizes_are_requested():
    with pytest.raises(ConfigurationError, match="the planner does not know the layers of this model"):
        of_config(ModelConfig(kind="import", factory="a:b"))
    with pytest.raises(ConfigurationError, match=r"data\.context"):
        of_config(ModelConfig())
    with pytest.raises(ConfigurationError, match=r"data\.features"):
        of_config(ModelConfig(kind="mlp"))
    with pytest.raises(ConfigurationError, match="picture"):
        of_config(ModelConfig(kind="convnet"))
