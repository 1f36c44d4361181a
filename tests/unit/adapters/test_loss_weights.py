"""Weighted losses, such as of padded targets: the same results on any ranks and micro-batches, or rejected."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn import functional

from harness import trainings
from harness.marks import cases
from hpcdist.adapters.torch.loss import TorchLoss
from hpcdist.adapters.torch.model import wrap
from hpcdist.adapters.torch.values import StageValues
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import DataError, UsageError
from hpcdist.models.arena import Arena
from hpcdist.models.stage import Draw
from hpcdist.training.data import own_samples

CLASSES, CONTEXT, SAMPLES, STEPS, RATE, CLIP = 11, 6, 12, 4, 0.5, 0.3
KEYS = {
    "model.kind": "mlp",
    "run.global_batch": SAMPLES,
    "run.steps": STEPS,
    "optimizer.name": "sgd",
    "optimizer.momentum": 0.0,
    "optimizer.learning_rate": RATE,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_norm": CLIP,
    "optimizer.decay": "constant",
    "optimizer.warmup_steps": 0,
}


def token_cross_entropy(outputs, targets, **options):
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), **options)


def mean_loss(outputs, targets):
    return token_cross_entropy(outputs, targets)


def sum_and_weight(outputs, targets):
    return token_cross_entropy(outputs, targets, reduction="sum"), (targets != -100).sum()


def masked_mean(outputs, targets):
    losses, mask = token_cross_entropy(outputs, targets, reduction="none"), (targets != -100).flatten().float()
    return (losses * mask).sum() / mask.sum()


def mean_of_selected(outputs, targets):
    return token_cross_entropy(outputs, targets, reduction="none")[targets.flatten() != -100].mean()


def class_weighted_mean(outputs, targets):
    return token_cross_entropy(outputs, targets, weight=torch.linspace(0.1, 2.0, CLASSES))


def label_smoothed_mean(outputs, targets):
    return token_cross_entropy(outputs, targets, label_smoothing=0.1)


def build_module(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(CLASSES, 5), nn.Linear(5, CLASSES))


def draw_batches(rng, *, padded_from=0):
    """Return batches of tokens and targets (samples, context). Batches from step ``padded_from`` on are padded."""
    x = rng.integers(CLASSES, size=(STEPS, SAMPLES, CONTEXT))
    y = rng.integers(CLASSES, size=(STEPS, SAMPLES, CONTEXT))
    lengths = rng.integers(0, CONTEXT + 1, (STEPS, SAMPLES, 1))
    lengths[:, :3], lengths[:, 3:] = 0, np.maximum(lengths[:, 3:], 1)  # gives ranks and micro-batches without a target
    lengths[:padded_from] = CONTEXT
    y[np.arange(CONTEXT) >= lengths] = -100
    return list(zip(x, y, strict=True))


def train_plain(module, loss, batches, clip=CLIP, delayed=False):
    """Train with PyTorch on whole batches; return losses, gradient norms and parameters."""
    losses, norms, before = [], [], None
    for x, y in batches:
        module.zero_grad()
        value = loss(module(torch.from_numpy(x)), torch.from_numpy(y))
        value = value[0] / value[1] if isinstance(value, tuple) else value
        value.backward()
        gradient = [parameter.grad for parameter in module.parameters()]
        applied, before = (before if delayed else gradient), [one.clone() for one in gradient]
        losses.append(value.item())
        if applied is not None:
            norm = torch.linalg.vector_norm(torch.cat([one.flatten() for one in applied])).item()
            factor = min(1.0, clip / norm) if clip else 1.0
            norms.append(norm)
            with torch.no_grad():
                for parameter, one in zip(module.parameters(), applied, strict=True):
                    parameter -= RATE * factor * one
    return losses, norms, {name: value.detach().numpy() for name, value in module.named_parameters()}


def train_wrapped(rng, loss, ranks, keys, batches, **options):
    """Train a wrapped model on threads. Return losses, norms, parameters and evaluation losses, all of rank 0."""
    seed = int(rng.integers(1 << 31))
    models = [wrap(build_module(seed), loss, example=batches[0][0], **options) for _ in range(ranks)]

    def body(comm):
        trainer = trainings.trainer_of(comm, KEYS | keys, model=models[comm.rank])
        results, evaluated = [], []
        for number, (x, y) in enumerate(batches, start=1):
            computes = trainer.context.computes
            local_slice = own_samples(trainer.recipe, trainer.data_axis, number - 1, trainer.shares).slice
            trainer.flush()
            evaluated.append(trainer.evaluate([[(x[local_slice], y[local_slice])] if computes else []]))
            batch = trainer.cut((x[local_slice], y[local_slice])) if computes else []
            results.append(trainer.step(number, batch, np.zeros(2)))
        trainer.flush()
        state = {
            name.split(".", 1)[1]: values
            for (kind, name), values in trainings.state(trainer).items()
            if kind == "parameters"
        }
        trainer.close()
        return [one.loss for one in results], [one.gradient_norm for one in results], state, evaluated

    return seed, run_threads(ranks, body)[0]


def assert_same_training(rng, loss, ranks, keys, *, clip=CLIP, delayed=False, norms=True, padded_from=0, **options):
    batches = draw_batches(rng, padded_from=padded_from)
    seed, result = train_wrapped(rng, loss, ranks, {"optimizer.clip_norm": clip, **keys}, batches, **options)
    expected = train_plain(build_module(seed), loss, batches, clip, delayed)
    np.testing.assert_allclose(result[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(result[3], expected[0], rtol=1e-5)
    if norms:
        np.testing.assert_allclose(result[1][delayed:], expected[1], rtol=1e-4)
    if not delayed:
        for name, values in expected[2].items():
            np.testing.assert_allclose(result[2][name].reshape(values.shape), values, rtol=1e-4, atol=2e-6)


LAYOUTS = {
    "one rank": (1, {"parallel.microbatches": 4}),
    "allreduce": (2, {"parallel.microbatches": 2}),
    "three ranks": (3, {}),
    "zero2": (2, {"parallel.strategy": "zero2", "parallel.microbatches": 3}),
    "zero3": (2, {"parallel.strategy": "zero3"}),
    "pipeline": (2, {"parallel.pipeline": 2, "parallel.microbatches": 4}),
    "pipelines of zero1": (
        4,
        {"parallel.pipeline": 2, "parallel.microbatches": 2, "parallel.strategy": "zero1"},
    ),
    "parameter server": (3, {"parallel.strategy": "parameter_server", "parallel.microbatches": 2}),
    "logical shards": (2, {"run.logical_shards": 4}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sum_and_weight_loss_matches_whole_batch(layout, rng):
    ranks, keys = LAYOUTS[layout]
    assert_same_training(rng, sum_and_weight, ranks, keys, tokens_per_sample=CONTEXT, padded_from=int(rng.integers(3)))


@pytest.mark.parametrize("loss", [mean_loss, masked_mean, mean_of_selected, class_weighted_mean, label_smoothed_mean])
def test_mean_over_unpadded_targets_matches_whole_batch(loss, rng):
    """The weight is read from PyTorch's autograd graph. The first steps may have no padding."""
    assert_same_training(rng, loss, 2, {"parallel.microbatches": 1}, padded_from=int(rng.integers(3)))


def test_delayed_update_uses_weight_of_its_own_gradient(rng):
    assert_same_training(
        rng, sum_and_weight, 2, {"communication.delayed": True, "communication.overlap": "thread"}, delayed=True
    )


def test_local_sgd_weighs_replica_gradients(rng):
    keys = {"parallel.strategy": "local_sgd", "decentralised.period": 1}
    assert_same_training(rng, sum_and_weight, 2, keys, clip=0.0, norms=False)


def root_mean_square(outputs, targets):
    return (outputs**2).mean().sqrt()


def contrastive_loss(outputs, targets):
    rows = functional.normalize(outputs.flatten(1), dim=1)
    return functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def two_term_mean(outputs, targets):
    return mean_loss(outputs, targets) + 0.1 * (outputs**2).mean()


def mean_of_sample_losses(outputs, targets):
    return torch.stack([functional.cross_entropy(*one) for one in zip(outputs, targets, strict=True)]).mean()


def mean_normalised_before_sum(outputs, targets):
    mask = (targets != -100).flatten().float()
    return (token_cross_entropy(outputs, targets, reduction="none") * mask / mask.sum()).sum()


@cases(
    "loss, message",
    (root_mean_square, "ends in SqrtBackward0, which hides the weight"),
    (contrastive_loss, "the mean of the losses of their halves is"),
    (two_term_mean, "adds means over different numbers of targets"),
    (mean_of_sample_losses, "averages means over different numbers of targets"),
    (mean_normalised_before_sum, "it is a sum"),
    (lambda outputs, targets: (mean_loss(outputs, targets), outputs.sum()), "the weight is a tensor with a gradient"),
    (lambda outputs, targets: (mean_loss(outputs, targets), targets), r"the weight is a tensor of shape \(12, 6\)"),
    (lambda outputs, targets: (*sum_and_weight(outputs, targets), 1), r"type tuple; .* or \(sum, weight\)"),
)
def test_weighted_mean_without_visible_weights_is_rejected(loss, message, rng):
    (x, y), *_ = draw_batches(rng)
    judge, module = TorchLoss(loss, "mean", 1, StageValues("stage 0")), build_module(0)
    outputs = module(torch.from_numpy(x)).detach().numpy()
    with pytest.raises(UsageError, match=message):
        judge.forward(outputs, y, wrap(module, mean_loss).operations, Arena().saved(0))


@pytest.mark.parametrize("loss", [mean_loss, masked_mean, functional.mse_loss, functional.smooth_l1_loss])
def test_equal_weights_give_the_plain_mean_bit_for_bit(loss, rng):
    """The loss and the gradient equal the mean's, times the number of predictions, bit for bit."""
    (x, y), *_ = draw_batches(rng, padded_from=1)
    outputs = build_module(0)(torch.from_numpy(x)).detach()
    targets = torch.from_numpy(y) if loss in (mean_loss, masked_mean) else torch.randn_like(outputs)
    judge, saved = TorchLoss(loss, "mean", CONTEXT, StageValues("stage 0")), Arena().saved(0)
    saved.draw = Draw(0, 1, 0)
    total = judge.forward(outputs.numpy().copy(), targets.numpy(), None, saved)
    gradient = judge.backward(0.5, None, saved)
    outputs.requires_grad_()
    expected = loss(outputs, targets) * (SAMPLES * CONTEXT)
    expected.backward(torch.tensor(0.5))
    assert total == expected.item() and saved["loss.weight"] == SAMPLES * CONTEXT
    np.testing.assert_array_equal(gradient, outputs.grad.numpy())


def test_batch_without_targets_is_rejected(rng):
    (x, y), *_ = draw_batches(rng)
    trainer = trainings.trainer_of(solo(), KEYS, model=wrap(build_module(0), sum_and_weight, example=x))
    with pytest.raises(DataError, match=r"step 1: the weights of all targets in the batch sum to 0.0"):
        trainer.step(1, trainer.cut((x, np.full_like(y, -100))), np.zeros(2))
    assert np.isnan(trainer.evaluate([[(x, np.full_like(y, -100))]]))
