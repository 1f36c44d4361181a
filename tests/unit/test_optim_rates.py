"""The schedule at its corners, and the checks of the optimizer section."""

import math
import subprocess
import sys

import pytest

from hpcdist.errors import ConfigurationError
from hpcdist.optim.config import OptimizerConfig
from hpcdist.optim.rates import learning_rate


def rates(total, **options):
    config = OptimizerConfig(learning_rate=2.0, **options)
    return [learning_rate(config, t, total) for t in range(1, total + 3)]


def test_warm_up_is_linear_and_never_zero():
    got = rates(20, warmup_steps=4, decay="constant")
    assert got == pytest.approx([0.5, 1.0, 1.5, 2.0] + [2.0] * 18)


@pytest.mark.parametrize("decay", ["cosine", "polynomial"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_decay_ends_at_the_final_fraction_and_stays(decay, warmup):
    got = rates(30, warmup_steps=warmup, decay=decay, final_fraction=0.25, power=1.5)
    assert got[29:] == pytest.approx([0.5, 0.5, 0.5])
    falling = got[max(0, warmup - 1) :]
    assert falling == sorted(falling, reverse=True) and max(got) <= 2.0


def test_half_way():
    assert rates(20, warmup_steps=0, decay="cosine", final_fraction=0.0)[9] == pytest.approx(1.0)
    assert rates(20, warmup_steps=0, decay="cosine", final_fraction=0.5)[4] == pytest.approx(
        1 + 0.5 * (1 + math.cos(math.pi / 4))
    )
    assert rates(20, warmup_steps=0, decay="polynomial", final_fraction=0.0, power=2.0)[9] == pytest.approx(0.5)


def test_a_warm_up_longer_than_the_run_is_cut_off():
    assert rates(2, warmup_steps=4, decay="cosine") == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert rates(4, warmup_steps=4, decay="cosine", final_fraction=0.5)[3:] == pytest.approx([2.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "adam"}, "optimizer.name = 'adam'; choose one of adamw"),
        ({"decay": "linear"}, "optimizer.decay = 'linear'"),
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
    ],
)
def test_values_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ConfigurationError) as caught:
        OptimizerConfig(**options)
    assert message in str(caught.value)


def test_the_section_is_light():
    code = (
        "import sys, hpcdist.optim.config, hpcdist.optim.rates; "
        "print([m for m in ('numpy', 'numba', 'mpi4py', 'h5py', 'cupy') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "[]"
