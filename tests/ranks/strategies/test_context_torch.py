"""Wrapped PyTorch modules with samples split over context ranks: attention and positions cover all ranks."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn import functional

from harness.trainings import assert_rejected, recipe_keys
from hpcdist.adapters.torch import context_attention, context_positions, wrap
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import ConfigurationError, DataError, UsageError
from hpcdist.models.arena import Arena
from hpcdist.models.stage import Draw
from hpcdist.strategies.context.axis import ContextAxis
from hpcdist.strategies.context.model import cut_context

VOCABULARY, CONTEXT, HIDDEN, HEADS = 19, 21, 16, 4


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(CONTEXT, HIDDEN)

    def forward(self, x):
        return self.tokens(x) + self.positions(context_positions(x.shape[1]))


class Block(nn.Module):
    """Attention with two key heads and a custom scale."""

    def __init__(self, attention=context_attention, **seen) -> None:
        super().__init__()
        self.norm, self.attention, self.seen = nn.LayerNorm(HIDDEN), attention, {"is_causal": True} | seen
        self.qkv, self.out = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        parts = self.qkv(self.norm(x)).unflatten(2, (2 * HEADS, -1)).transpose(1, 2)
        q, k, v = parts[:, :HEADS], parts[:, HEADS : HEADS + 2], parts[:, HEADS + 2 :]
        mixed = self.attention(q, k, v, **self.seen, scale=0.7, enable_gqa=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def language_model(seed, **options):
    torch.manual_seed(seed)
    return nn.Sequential(Embed(), Block(**options), Block(**options), nn.Linear(HIDDEN, VOCABULARY)).double()


def loss(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def wrapped(module, x):
    return wrap(module, loss, example=x[:1], tokens_per_sample=CONTEXT)


def step(model, x, y):
    """Return the summed loss and its gradient, after an evaluation with the same result."""
    store, gradient = FlatStore(model.layout, model.dtype), FlatStore(model.layout, model.dtype)
    model.initialise(store, 0)
    parameters, into, arena = model.bind(store), model.bind_gradients(gradient), Arena()
    for stage in into:
        stage.begin_step()
    evaluated = model.evaluate(parameters, x, y, arena)
    logits = model.forward(parameters, x, arena, draw=Draw(0, 1, 0))
    total = float(model.loss.forward(logits, y, model.operations, arena.saved(model.stages[-1].layer)))
    model.backward(parameters, into, 0.5, arena)
    assert total == pytest.approx(evaluated, rel=1e-13)
    return total, gradient.array.copy()


@pytest.fixture
def axis(comm):
    if comm.size not in (2, 3):
        pytest.skip("for 2 or 3 ranks")
    return ContextAxis(comm, CONTEXT)


def banded(window):
    """Return the attention mask of a window, or of all tokens without a window, built pair by pair."""
    window = window or CONTEXT
    return torch.tensor([[0 <= row - column < window for column in range(CONTEXT)] for row in range(CONTEXT)])


@pytest.mark.parametrize("window", [0, 1, 5, 14])
def test_attention_of_wrapped_modules_matches_whole_samples(window, axis, rng):
    """The modules define a window, so key blocks are not sent to ranks that do not see them."""
    seed, tokens = int(rng.integers(1 << 31)), rng.integers(0, VOCABULARY, (3, CONTEXT + 1))
    x, y = tokens[:, :-1], tokens[:, 1:]
    pytorch = {"attention": functional.scaled_dot_product_attention, "is_causal": False, "attn_mask": banded(window)}
    total, gradient = step(wrapped(language_model(seed, **pytorch), x), x, y)
    model = cut_context(wrapped(language_model(seed, window=window), x), axis)
    assert model.stages[-1].output_shape(2) == (2, axis.tokens, VOCABULARY)
    with pytest.raises(DataError, match="needs samples of data.context = 21 tokens"):
        axis.cut(x[:, 1:])
    local_data = np.append(*step(model, axis.cut(x), axis.cut(y))[::-1])
    axis.comm.allreduce(local_data)
    assert local_data[-1] == pytest.approx(total, rel=1e-13)
    assert np.linalg.norm(local_data[:-1] - gradient) <= 1e-13 * np.linalg.norm(gradient)


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_context_attention_does_not_change_the_queries(method, comm, rng, monkeypatch):
    """The module uses the queries again. Heads are exchanged in place if pieces are even."""
    if comm.size != 2:
        pytest.skip("for 2 ranks")
    monkeypatch.setitem(globals(), "CONTEXT", 16)

    def twice(attention):
        def forward(q, k, v, scale, **seen):
            q = q.transpose(1, 2).contiguous().transpose(1, 2)  # as a linear of its own gives them
            return attention(q, k, v, **seen) * q

        return forward

    seed, tokens = int(rng.integers(1 << 31)), rng.integers(0, VOCABULARY, (3, CONTEXT + 1))
    x, y = tokens[:, :-1], tokens[:, 1:]
    pytorch = {"attention": twice(functional.scaled_dot_product_attention), "is_causal": True}
    total, gradient = step(wrapped(language_model(seed, **pytorch), x), x, y)
    axis = ContextAxis(comm, CONTEXT, method)
    model = cut_context(wrapped(language_model(seed, attention=twice(context_attention)), x), axis)
    local_data = np.append(*step(model, axis.cut(x), axis.cut(y))[::-1])
    comm.allreduce(local_data)
    assert local_data[-1] == pytest.approx(total, rel=1e-13)
    assert np.linalg.norm(local_data[:-1] - gradient) <= 1e-13 * np.linalg.norm(gradient)


def test_modules_that_ignore_other_ranks_are_rejected(axis, rng):
    def masked(q, k, v, **_):
        return context_attention(q, k, v, dropout_p=0.1, enable_gqa=True)

    x = rng.integers(0, VOCABULARY, (2, CONTEXT))
    cut, blind = axis.cut(x), language_model(1, attention=functional.scaled_dot_product_attention)
    with pytest.raises(UsageError, match="no stage calls"):
        step(cut_context(wrapped(blind, x), axis), cut, cut)
    with pytest.raises(UsageError, match="neither attn_mask nor dropout_p"):
        step(cut_context(wrapped(language_model(1, attention=masked), x), axis), cut, cut)
    with pytest.raises(UsageError, match="window = 3, is_causal = False"):
        step(cut_context(wrapped(language_model(1, window=3, is_causal=False), x), axis), cut, cut)
    with pytest.raises(ConfigurationError, match="tokens_per_sample"):
        cut_context(wrap(blind, loss, example=x[:1]), axis)
    keys = recipe_keys("parallel.context=2 kind=given")
    for changed in ("parallel.pipeline=2 parallel.microbatches=2", "parallel.recompute=true"):
        assert_rejected({**keys, **recipe_keys(changed)}, "not built")


def test_context_attention_without_ranks_is_pytorch_attention():
    q = torch.randn(2, 4, 5, 3)
    expected = functional.scaled_dot_product_attention(q, q, q, dropout_p=0.0, is_causal=True)
    assert (context_attention(q, q, q, is_causal=True) == expected).all()
    q = torch.randn(2, 4, CONTEXT, 3)
    expected = functional.scaled_dot_product_attention(q, q, q, banded(4))
    assert (context_attention(q, q, q, is_causal=True, window=4) == expected).all()
    for wrong in ({"window": -1, "is_causal": True}, {"window": 4}, {"window": 4, "attn_mask": banded(4)}):
        with pytest.raises(UsageError, match="window must be at least 0 tokens"):
            context_attention(q, q, q, **wrong)
    assert context_positions(4).tolist() == [0, 1, 2, 3]
