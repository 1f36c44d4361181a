"""A backward in two passes: the bits of the joint backward, in memory that is not overwritten in between."""

import numpy as np
import pytest

from harness.devices import MODELS, ModelRun, batches_of
from hpcdist.models.arena import Arena


def _three(case, rng):
    return [batch for _ in range(2) for batch in batches_of(case, rng)][:3]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", MODELS)
def test_two_passes_have_the_bits_of_the_joint_backward(case, dtype, together, rng):
    batches, seed = _three(case, rng), int(rng.integers(1 << 30))
    joint, two = ModelRun(case, dtype, "cpu", seed), ModelRun(case, dtype, "cpu", seed)
    for _ in range(2):  # the second step finds memory that the first one has given back
        joint.step(batches)
        two.split_step(batches, together)
        assert joint.gradient.array.any() and (two.gradient.array == joint.gradient.array).all()


def test_first_pass_writes_no_weight_gradient_and_frees_memory(rng):
    batches = batches_of("gpt", rng)[:1]
    run, whole = ModelRun("gpt", "float64", "cpu", 0), ModelRun("gpt", "float64", "cpu", 0)
    held = []
    run._weights = lambda number, stages: held.append(_busy_bytes(run.arena))
    run.split_step(batches, together=True)
    for segment in run.model.layout.segments:
        first_pass = "norm" in segment.key or segment.key == "0.positions.weight"
        assert run.gradient.view(segment.key).any() == first_pass, segment.key
    whole.model.forward(whole.parameters, batches[0][0], whole.arena)
    assert 0 < held[0] < _busy_bytes(whole.arena)


def _busy_bytes(arena):
    return sum(block.nbytes for block, uses in zip(arena._blocks, arena._uses, strict=True) if uses)


def test_held_arrays_outlive_the_release_of_their_owner():
    arena = Arena()
    one, other = arena.saved(0), arena.saved(1)
    x = one.empty("y", (100,), np.float64)
    one.empty("z", (100,), np.float64)
    other.keep("x", x[3:])
    other.keep("data", np.ones(3))
    assert one.owns(x) and one.owns(x[3:]) and not other.owns(x) and not one.owns(np.ones(3))
    other.hold("x")
    other.hold("data")
    other.narrow()
    one.release()
    taken = arena.saved(2)
    fresh = [taken.empty(str(i), (100,), np.float64) for i in range(3)]
    assert not any(np.may_share_memory(x, array) for array in fresh)
    assert other["data"].sum() == 3
    other.release()
    assert np.may_share_memory(x, arena.saved(3).empty("x", (100,), np.float64))
