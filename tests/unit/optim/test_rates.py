"""The schedule at its corners, and the checks of the optimizer section."""

import math

import pytest

from harness import jobs
from harness.marks import cases
from hpcdist.errors import ConfigurationError
from hpcdist.optim import rates as optim_rates
from hpcdist.optim.config import OptimizerConfig
from hpcdist.optim.rates import BatchSchedule, learning_rate


def rates(total, **options):
    config = OptimizerConfig(learning_rate=2.0, **options)
    return [learning_rate(config, t, total) for t in range(1, total + 3)]


def test_warm_up_is_linear_and_never_zero():
    assert rates(20, warmup_steps=4, decay="constant") == pytest.approx([0.5, 1.0, 1.5, 2.0] + [2.0] * 18)


@pytest.mark.parametrize("decay", ["cosine", "polynomial"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_decay_ends_at_the_final_fraction_and_stays(decay, warmup):
    got = rates(30, warmup_steps=warmup, decay=decay, final_fraction=0.25, power=1.5)
    assert got[29:] == pytest.approx([0.5, 0.5, 0.5])
    falling = got[max(0, warmup - 1) :]
    assert falling == sorted(falling, reverse=True) and max(got) <= 2.0


def test_rate_half_way_through_the_decay():
    assert rates(20, warmup_steps=0, decay="cosine", final_fraction=0.0)[9] == pytest.approx(1.0)
    assert rates(20, warmup_steps=0, decay="cosine", final_fraction=0.5)[4] == pytest.approx(
        1 + 0.5 * (1 + math.cos(math.pi / 4))
    )
    assert rates(20, warmup_steps=0, decay="polynomial", final_fraction=0.0, power=2.0)[9] == pytest.approx(0.5)


@cases(
    "decay, power, shape",
    ("polynomial", 1.0, lambda x: 1 - x),
    ("1-sqrt", 1.0, lambda x: 1 - x**0.5),
    ("cosine", 1.0, lambda x: (1 + math.cos(math.pi * x)) / 2),
)
def test_rate_is_constant_until_the_last_steps(decay, power, shape):
    got = rates(20, warmup_steps=4, decay=decay, decay_steps=10, final_fraction=0.25, power=power)
    assert got[:10] == pytest.approx([0.5, 1.0, 1.5] + [2.0] * 7)
    assert got[10:20] == pytest.approx([0.5 + 1.5 * shape(step / 10) for step in range(1, 11)])
    assert got[20:] == pytest.approx([0.5, 0.5])
    # A decay that is longer than the steps after the warm-up begins at its end.
    assert rates(20, warmup_steps=4, decay=decay, decay_steps=99) == rates(20, warmup_steps=4, decay=decay)


def test_inverse_square_root_does_not_depend_on_the_length_of_the_run():
    got = rates(400, warmup_steps=25, decay="inverse_sqrt")
    assert got[:25] == pytest.approx([2.0 * step / 25 for step in range(1, 26)])
    assert got[24:] == pytest.approx([2.0 * (25 / step) ** 0.5 for step in range(25, 403)])
    assert got == rates(1000, warmup_steps=25, decay="inverse_sqrt")[:402]
    assert rates(4, warmup_steps=0, decay="inverse_sqrt")[3] == pytest.approx(1.0)


def test_warm_up_longer_than_the_run_is_cut_off():
    assert rates(2, warmup_steps=4, decay="cosine") == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert rates(4, warmup_steps=4, decay="cosine", final_fraction=0.5)[3:] == pytest.approx([2.0, 1.0, 1.0])


def test_warm_up_that_ends_between_updates_stays_linear():
    assert rates(8, warmup_steps=2.5, decay="constant") == pytest.approx([0.8, 1.6] + [2.0] * 8)
    assert rates(8, warmup_steps=0.5, decay="constant") == pytest.approx([2.0] * 10)


@pytest.mark.parametrize("samples", [960, 1000, 7])
def test_warm_up_in_samples_is_the_same_for_every_batch(samples):
    config = OptimizerConfig(learning_rate=2.0, warmup_samples=samples, decay="constant")
    for batch in (1, 16, 30, 64):
        result = optim_rates.resolve_rate(config, BatchSchedule(batch))
        for update in (1, 2, 15, 16, 60, 61, 1000):
            assert learning_rate(result, update, 5000) == pytest.approx(2.0 * min(1, update * batch / samples))


def test_rate_scales_with_the_batch():
    def peak(batch, **options):
        config = optim_rates.resolve_rate(
            OptimizerConfig(learning_rate=0.1, warmup_steps=0, decay="constant", **options), BatchSchedule(batch)
        )
        return learning_rate(config, 1, 100)

    assert peak(64) == 0.1
    assert [peak(b, base_batch=64, scaling="linear") for b in (32, 64, 512)] == pytest.approx([0.05, 0.1, 0.8])
    assert [peak(b, base_batch=64, scaling="sqrt") for b in (16, 64, 1024)] == pytest.approx([0.05, 0.1, 0.4])
    plain = OptimizerConfig()
    assert (
        optim_rates.resolve_rate(plain, BatchSchedule(256)) == plain
        and optim_rates.describe_rate(plain, BatchSchedule(256)) == ""
    )
    output = optim_rates.describe_rate(
        OptimizerConfig(learning_rate=0.1, base_batch=64, scaling="sqrt", warmup_samples=1000), BatchSchedule(256)
    )
    assert "learning rate 0.2 at its peak: 0.1 of a batch of 64 samples, scaled to 256 (sqrt)" in output
    assert "warm-up over 1000 samples: 3.90625 updates" in output


def test_unresolved_rate_raises_assertion_error():
    with pytest.raises(AssertionError, match="resolve_rate"):
        learning_rate(OptimizerConfig(base_batch=8, scaling="linear"), 1, 10)


@cases(
    "options, message",
    ({"name": "adam"}, "optimizer.name = 'adam'; choose one of adamw"),
    ({"decay": "linear"}, "optimizer.decay = 'linear'"),
    ({"decay": "constant", "decay_steps": 5}, "optimizer.decay_steps = 5 has no effect"),
    ({"decay_steps": -1}, "optimizer.decay_steps = -1"),
    ({"learning_rate": 0.0}, "optimizer.learning_rate = 0.0; it must be finite and above 0"),
    ({"learning_rate": math.nan}, "optimizer.learning_rate = nan"),
    ({"beta2": 1.0}, "optimizer.beta2 = 1.0"),
    ({"epsilon": 0.0}, "optimizer.epsilon"),
    ({"clip_norm": -1.0}, "optimizer.clip_norm"),
    ({"weight_decay": math.inf}, "optimizer.weight_decay"),
    ({"warmup_steps": -1}, "optimizer.warmup_steps"),
    ({"final_fraction": 1.5}, "optimizer.final_fraction"),
    ({"nesterov": True}, "optimizer.nesterov"),
    ({"name": "sgd", "nesterov": True, "momentum": 0.0}, "optimizer.nesterov"),
    ({"base_batch": 64}, "optimizer.base_batch = 64 with optimizer.scaling = 'none'"),
    ({"scaling": "linear"}, "optimizer.scaling = 'linear' with optimizer.base_batch = 0"),
    ({"scaling": "cubic", "base_batch": 64}, "optimizer.scaling = 'cubic'; choose one of none, linear, sqrt"),
    ({"base_batch": -1}, "optimizer.base_batch = -1"),
    ({"warmup_samples": -1}, "optimizer.warmup_samples = -1"),
    ({"warmup_samples": 100, "warmup_steps": 7}, "only one option may set the length of the warm-up"),
    ({"name": "lars", "bias_correction": False}, "optimizer.bias_correction = false has no effect"),
    ({"momentum_correction": False}, "remove it, or set optimizer.name = 'lars'"),
    ({"trust_ratio_max": 10.0}, "optimizer.trust_ratio_max = 10.0 has no effect with optimizer.name = 'adamw'"),
    ({"name": "lamb", "trust_ratio_min": -0.1}, "optimizer.trust_ratio_min = -0.1"),
    (
        {"name": "lamb", "trust_ratio_min": 2.0, "trust_ratio_max": 1.0},
        "optimizer.trust_ratio_max = 1.0 with optimizer.trust_ratio_min = 2.0",
    ),
)
def test_invalid_optimizer_values_are_rejected(options, message):
    with pytest.raises(ConfigurationError) as caught:
        OptimizerConfig(**options)
    assert message in str(caught.value)


def test_optimizer_section_imports_no_heavy_modules():
    code = (
        "import sys, hpcdist.optim.config, hpcdist.optim.rates, hpcdist.optim.rates; "
        "print([m for m in ('numpy', 'numba', 'mpi4py', 'h5py', 'cupy') if m in sys.modules])"
    )
    assert jobs.python(code, check=True).stdout.strip() == "[]"
