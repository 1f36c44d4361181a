"""The [model] section refuses what cannot be built."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from hpcdist import models
from hpcdist.errors import ConfigurationError
from hpcdist.models.config import ModelConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "cnn"}, "model.kind is 'cnn'; choose one of gpt, mlp"),
        ({"layers": 0}, "model.layers is 0"),
        ({"hidden": -4}, "model.hidden is -4"),
        ({"heads": 0}, "model.heads is 0"),
        ({"vocabulary": 0}, "model.vocabulary is 0"),
        ({"hidden": 130}, "not a multiple of model.heads = 4"),
        ({"dropout": 1.0}, "less than 1"),
        ({"dropout": -0.1}, "at least 0"),
        ({"activation": "relu"}, "a gpt uses 'gelu'"),
        ({"activation": "swish"}, "choose one of gelu, relu"),
        ({"kind": "mlp", "tied": True}, "no token embedding"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ModelConfig(**changes)


def test_dropout_of_more_probabilities_than_can_be_counted_is_refused() -> None:
    config = ModelConfig(heads=16, hidden=128, dropout=0.1)
    with pytest.raises(ConfigurationError, match="model.heads = 16 and data.context = 32768"):
        models.build(config, context=32768)
    assert models.build(config, context=32764).tokens_per_sample == 32764


def test_hidden_of_an_mlp_needs_no_heads() -> None:
    assert ModelConfig(kind="mlp", hidden=7).hidden == 7


def test_frozen_and_keyword_only() -> None:
    with pytest.raises(FrozenInstanceError):
        ModelConfig().layers = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        ModelConfig("gpt")  # type: ignore[misc]


def test_build_refuses_missing_inputs_and_other_precisions() -> None:
    with pytest.raises(ConfigurationError, match="data.context is 0"):
        models.build(ModelConfig())
    with pytest.raises(ConfigurationError, match="0 features and 3 classes"):
        models.build(ModelConfig(kind="mlp"), classes=3)
    with pytest.raises(ConfigurationError, match="not in 'float16'"):
        models.build(ModelConfig(), "float16", context=4)
