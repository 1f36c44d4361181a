"""Models by name: their parameters match the numbers printed in the sources."""

import pytest

from hpcdist.errors import ConfigurationError
from hpcdist.planner.model import transformer
from hpcdist.planner.model.transformer import describe

# Names that say less than they print, or count other tensors too (see "but" in the table).
ROUGH = {"bert-base": 0.011, "bert-large": 0.018, "megatron-18.4b": 0.003, "llama-3-405b": 0.0025}


@pytest.mark.parametrize("name", transformer.names())
def test_parameters_match_the_source(name):
    printed = transformer._entry(name)["printed"]
    output = float(printed[:-1]) * {"M": 1e6, "B": 1e9, "T": 1e12}[printed[-1]]
    digits = len(printed[:-1].replace(".", ""))
    counted = describe(transformer.named(name), name).parameters
    if name in ROUGH:
        assert counted == pytest.approx(output, rel=ROUGH[name])
        return
    assert float(f"{counted:.{digits - 1}e}") == pytest.approx(output, rel=1e-12)


def test_megatron_table_matches_its_equation():
    # arXiv:2104.04473, equation 2, whose last norm is left out.
    rows = [name for name in transformer.names() if name.startswith("megatron-")]
    assert len(rows) == 14
    for name in rows:
        shape = transformer.named(name)
        layers, hidden = shape.layers, shape.hidden
        rest = (shape.vocabulary + shape.context) / (12 * layers * hidden)
        output = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + rest)
        assert describe(shape, name).parameters == pytest.approx(output + 2 * hidden, rel=1e-12)


def test_mixture_counts_all_of_its_experts():
    dense, mixed = (describe(transformer.named(name), name) for name in ("mistral-7b", "mixtral-8x7b"))
    feed_forward = 3 * 4096 * 14336
    assert mixed.parameters - dense.parameters == 32 * (7 * feed_forward + 8 * 4096)


def test_every_model_has_a_source():
    assert all(transformer._entry(name)["source"] for name in transformer.names())
    assert transformer.named("GPT3-175B") == transformer.named("gpt3-175b")


def test_unknown_model_name_is_rejected_with_suggestions():
    with pytest.raises(ConfigurationError, match="no published model 'llama-4-70b'; the nearest names are llama-3-70b"):
        transformer.named("llama-4-70b")
    with pytest.raises(ConfigurationError, match="choose one of gpt2, "):
        transformer.named("zzzzzz")
