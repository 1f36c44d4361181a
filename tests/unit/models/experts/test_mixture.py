"""Router and experts compared with PyTorch's autograd in float64: outputs, gradients, both losses, drops, loads."""

import math

import numpy as np
import pytest

from harness.marks import cases
from hpcdist.models.arena import Arena
from hpcdist.models.config import ModelConfig
from hpcdist.models.documents import Documents
from hpcdist.models.experts import router
from hpcdist.models.experts.mixture import LocalExperts
from hpcdist.models.experts.router import EXTRA, RouterState
from hpcdist.models.layers.linear import LocalActivation

torch = pytest.importorskip("torch")
SAMPLES, CONTEXT, HIDDEN, SCALE = 3, 7, 6, 0.125
CASES = {
    "softmax": {},
    "one a token": {"experts_per_token": 1, "experts": 3},
    "sigmoid": {"router": "sigmoid", "experts_per_token": 3},
    "sigmoid, one a token": {"router": "sigmoid", "experts_per_token": 1},
    "all experts": {"experts": 2},
    "dropped": {"capacity_factor": 0.6},
    "dropped, gated, sigmoid": {"capacity_factor": 0.8, "activation": "swiglu", "router": "sigmoid"},
    "relu, no bias": {"activation": "relu", "bias": False},
    "padded": {"filled": (7, 2, 5)},
    "padded, dropped, sigmoid": {"filled": (4, 7, 1), "capacity_factor": 0.6, "router": "sigmoid"},
}


class Case:
    """A mixture with random tensors, its input and the output gradient.

    Only ``filled`` positions of the samples count.
    """

    def __init__(self, rng, filled=(CONTEXT,) * SAMPLES, **keys):
        self.filled = np.array(filled)
        keys = {"experts": 5, "expert_hidden": 4, "balance_loss": 0.3, "z_loss": 0.2, **keys}
        self.config = ModelConfig(layers=2, hidden=HIDDEN, heads=2, **keys)
        config, count, wide = self.config, self.config.experts, self.config.expert_inner
        rises = (2, wide) if config.activation == "swiglu" else (wide,)
        shapes = {"router.weight": (count, HIDDEN), "experts.up.weight": (count, *rises, HIDDEN)}
        shapes["experts.down.weight"] = (count, HIDDEN, wide)
        if config.bias:
            shapes |= {"experts.up.bias": (count, *rises), "experts.down.bias": (count, HIDDEN)}
        self.parameters = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
        self.x, self.dy = (rng.standard_normal((SAMPLES, CONTEXT, HIDDEN)) for _ in range(2))
        self.state = RouterState(config)
        self.gradients = Written({name: np.full(shape, np.nan) for name, shape in shapes.items()})

    def run(self, x=None, dy=None):
        """Return y and dx computed by hpcdist."""
        x, dy = self.x if x is None else x, self.dy if dy is None else dy
        mixture, activation = LocalExperts(self.config, int, self.state), LocalActivation()
        saved = Arena().saved(2)
        saved.scale, places = SCALE, np.tile(np.arange(CONTEXT), (len(x), 1))
        if len(x) == SAMPLES:
            saved.documents = Documents(places, places, self.filled)
        y = mixture.begin(self.parameters, x, activation, saved)().copy()
        return y, mixture.begin_backward(self.parameters, self.gradients, dy, activation, saved)().copy()


class Written:
    """Gradient buffers: the first write overwrites, later writes add."""

    def __init__(self, arrays):
        self.arrays, self.written = arrays, set()

    def into(self, name):
        add = name in self.written
        self.written.add(name)
        return self.arrays[name], add

    def wants(self, name):
        return name in self.arrays


def reference(case, bias=0.0):
    """Return y, both losses with their coefficients as sums over tokens, loads and drops, computed by PyTorch loops."""
    config, act = case.config, {"relu": torch.relu, "swiglu": None}.get(case.config.activation)
    act = act or (lambda value: torch.nn.functional.gelu(value, approximate="tanh"))
    p = {name: torch.tensor(value, requires_grad=True) for name, value in case.parameters.items()}
    x = torch.tensor(case.x, requires_grad=True)
    count, each = config.experts, config.experts_per_token
    logits = x @ p["router.weight"].T
    scores = torch.sigmoid(logits) if config.router == "sigmoid" else torch.softmax(logits, -1)
    shares = scores / scores.sum(-1, keepdim=True)
    loads, drops, losses = np.zeros(count), 0, torch.zeros((), dtype=torch.float64)
    outputs = []
    for sample, size in enumerate(case.filled.tolist()):
        of_sample = np.zeros(count)
        room = math.ceil(config.capacity_factor * each * size / count) if config.capacity_factor else size
        for token in range(size):
            order = np.argsort(-(scores[sample, token].detach().numpy() + bias), kind="stable")[:each]
            gates = scores[sample, token][order.tolist()]
            gates = gates / gates.sum() if each > 1 else gates
            total = torch.zeros(HIDDEN, dtype=torch.float64)
            for gate, e in zip(gates, order, strict=True):
                of_sample[e] += 1
                if of_sample[e] > room:
                    drops += 1
                    continue
                wide = p["experts.up.weight"][e] @ x[sample, token]
                if config.bias:
                    wide = wide + p["experts.up.bias"][e]
                wide = torch.nn.functional.silu(wide[0]) * wide[1] if config.activation == "swiglu" else act(wide)
                out = p["experts.down.weight"][e] @ wide
                total = total + gate * (out + p["experts.down.bias"][e] if config.bias else out)
            outputs.append(total)
        outputs += [torch.zeros(HIDDEN, dtype=torch.float64)] * (CONTEXT - size)
        share_of_choices = torch.tensor(of_sample / (each * size))
        balance = count * (share_of_choices * shares[sample, :size].mean(0)).sum()
        losses = losses + config.balance_loss * size * balance
        losses = losses + config.z_loss * (torch.logsumexp(logits[sample, :size], -1) ** 2).sum()
        loads += of_sample
    routed = torch.cat([shares[sample, :size] for sample, size in enumerate(case.filled.tolist())])
    return torch.stack(outputs).reshape(x.shape), losses, (p, x), loads, drops, routed


@cases("name", *CASES)
def test_mixture_matches_autograd(rng, name):
    case = Case(rng, **CASES[name])
    case.state.bias[1] = rng.standard_normal(case.config.experts) * 0.2
    want, losses, (p, x), loads, drops, shares = reference(case, case.state.bias[1])
    (SCALE * losses + (want * torch.tensor(case.dy)).sum()).backward()
    y, dx = case.run()
    np.testing.assert_allclose(y, want.detach().numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(dx, x.grad.numpy(), rtol=1e-11, atol=1e-12)
    for tensor, value in p.items():
        grad = np.zeros(value.shape) if value.grad is None else value.grad.numpy()
        np.testing.assert_allclose(case.gradients.arrays[tensor], grad, rtol=1e-11, atol=1e-12, err_msg=tensor)
    seen, count = case.state.take(), case.config.experts
    assert not seen[0].any() and not case.state.seen.any()  # the other layer saw nothing; all is taken
    np.testing.assert_array_equal(seen[1, :count], loads)
    assert seen[1, count] == drops
    assert (drops > 0) == (case.config.capacity_factor > 0)
    entropy = -(shares * shares.log()).sum().item()
    balance, z = seen[1, count + 2], seen[1, count + 3]
    assert seen[1, count + 1] == pytest.approx(entropy, rel=1e-12)
    total = case.config.balance_loss * balance + case.config.z_loss * z
    assert total == pytest.approx(losses.item(), rel=1e-12)
    assert len(seen[1]) == count + EXTRA


def test_all_tokens_to_one_expert_leave_other_gradients_zero(rng):
    """Forced imbalance: the other experts have no rows and zero gradients."""
    case = Case(rng, experts_per_token=1)
    case.state.bias[1, 3] = 100
    y, _ = case.run()
    want, *_ = reference(case, case.state.bias[1])
    np.testing.assert_allclose(y, want.detach().numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(case.state.take()[1, :5], [0, 0, 0, SAMPLES * CONTEXT, 0])
    up = case.gradients.arrays["experts.up.weight"]
    assert up[3].any() and not np.delete(up, 3, axis=0).any()


def test_samples_one_by_one_add_up_to_the_batch(rng):
    """Samples one by one give the gradients, the drops and the loads of the batch. An empty batch adds nothing."""
    whole = Case(np.random.default_rng(5), capacity_factor=0.7)
    y, dx = whole.run()
    parts = Case(np.random.default_rng(5), capacity_factor=0.7)
    ys, dxs = zip(
        *(parts.run(whole.x[part], whole.dy[part]) for part in (slice(0, 1), slice(1, 1), slice(1, 3))), strict=True
    )
    np.testing.assert_allclose(np.concatenate(ys), y, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(np.concatenate(dxs), dx, rtol=1e-13, atol=1e-14)
    for name, want in whole.gradients.arrays.items():
        np.testing.assert_allclose(parts.gradients.arrays[name], want, rtol=1e-12, atol=1e-13, err_msg=name)
    np.testing.assert_allclose(parts.state.take(), whole.state.take(), rtol=1e-12)


def test_drops_follow_the_token_order():
    """A token does not depend on later tokens: the first ``room`` choices of an expert are kept, for any rank order."""
    chosen = np.array([[0, 1], [1, 0], [0, 1], [1, 2]], np.int32)
    places, none = np.empty_like(chosen), np.zeros((1, 1, 3), np.int64)

    def placed(runs, before, *rooms):
        return router.place(chosen, runs, router.count(chosen, runs, 3), before, np.array(rooms), places)

    np.testing.assert_array_equal(placed(np.array([[[0, 4]]]), none, 2), [0, 2, 4, 5])
    np.testing.assert_array_equal(places, [[0, 2], [3, 1], [-1, -1], [-1, 4]])
    two = np.array([[[0, 2]], [[2, 4]]])
    assert placed(two, np.repeat(none, 2, 0), 2, 2)[-1] == 8  # of each sample
    head_and_tail, before = (
        np.array([[[0, 1], [2, 4]]]),
        np.array([[[0, 0, 0], [1, 2, 0]]]),
    )  # of the four tokens the second is padding
    assert placed(head_and_tail, before, 2)[-1] == 4
    np.testing.assert_array_equal(places, [[0, 2], [-1, -1], [1, -1], [-1, 3]])


def test_router_bias_moves_against_the_load():
    state = RouterState(ModelConfig(layers=1, experts=4, balance_rate=0.5))
    state.balance(np.array([[6.0, 2.0, 4.0, 4.0]]))
    np.testing.assert_array_equal(state.bias, [[-0.5, 0.5, 0, 0]])
    other = RouterState(ModelConfig(layers=1, experts=4, balance_rate=0.5))
    other.restore(state.state())
    np.testing.assert_array_equal(other.bias, state.bias)
    other.restore({"router_bias": [[1.0]]})  # of another model
    np.testing.assert_array_equal(other.bias, state.bias)
    assert RouterState(ModelConfig(experts=4)).state() == {}


def test_non_finite_input_gives_nan(rng):
    case = Case(rng)
    case.x[0, 0, 0] = np.nan
    y, _ = case.run()
    assert np.isnan(y[0, 0]).all() and np.isfinite(y[1:]).all()
