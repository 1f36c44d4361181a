"""A U-Net under `Training`, as people train it, against PyTorch in one process on the whole batch.

It has SyncBatchNorm, skips, parameter groups, a cosine schedule, clipping and a moving average of the parameters.
"""

from pathlib import Path

import pytest

import hpcdist

torch = pytest.importorskip("torch")

EXAMPLES = Path(hpcdist.__file__).parent / "docs" / "examples"
SCRIPT = """
import argparse, math, sys
import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from hpcdist.training.pytorch import Training, load, recipe_of, wrap

sys.path.insert(0, sys.argv[1])
import unet

strategy, dtype, tolerance = sys.argv[2], getattr(torch, sys.argv[3]), float(sys.argv[4])
STEPS, BATCH, DECAY = 6, 12, 0.9
options = argparse.Namespace(norm="batch", width=8, dropout=0.0)
pictures = torch.from_numpy(np.random.default_rng(1).normal(size=(STEPS, 2, BATCH, 1, 16, 16))).to(dtype)
levels = torch.from_numpy(np.random.default_rng(2).random((STEPS, BATCH))).to(dtype)

def build():
    torch.manual_seed(3)
    return unet.UNet(1, options).to(dtype)

def parts(model):
    # A larger eps: the gradients of biases before a norm are zero up to rounding, and AdamW would enlarge them.
    optimizer = torch.optim.AdamW(unet.groups(model), lr=3e-3, betas=(0.9, 0.95), eps=1e-3)
    rate = lambda step: (1 + math.cos(math.pi * step / STEPS)) / 2
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

model = build()
model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
optimizer, scheduler = parts(model)
keys = recipe_of(optimizer, scheduler) | {"run.steps": STEPS, "run.global_batch": BATCH, "parallel.strategy": strategy}
keys |= {"precision.mode": sys.argv[3], "optimizer.clip_norm": 0.5, "optimizer.ema_decay": DECAY}
example = ((pictures[0, 0, :2], levels[0, :2]), pictures[0, 1, :2])
losses = []
with Training(wrap(model, nn.functional.mse_loss, example=example, cut=True), keys) as training:
    for step in training.steps:
        noisy, clean = (values[training.share] for values in pictures[step])
        losses.append(training.step((noisy, levels[step][training.share]), clean))
    rank = training.rank
averaged = build()
load(averaged, training.parameters(averaged=True))
load(model, training.parameters())

reference = build()
optimizer, scheduler = parts(reference)
average = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
expected = []
for step in range(STEPS):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(reference(pictures[step, 0], levels[step]), pictures[step, 1])
    loss.backward()
    norm = torch.nn.utils.get_total_norm(parameter.grad for parameter in reference.parameters())
    for parameter in reference.parameters():  # clip_grad_norm_ adds 1e-6 to the norm
        parameter.grad *= min(1.0, 0.5 / norm.item())
    optimizer.step()
    scheduler.step()
    average.update_parameters(reference)
    expected.append(loss.item())
np.testing.assert_allclose(losses, expected, rtol=tolerance)
for name, values in reference.state_dict().items():
    np.testing.assert_allclose(model.state_dict()[name], values, rtol=tolerance, atol=tolerance, err_msg=name)
for (name, values), found in zip(average.module.named_parameters(), averaged.parameters()):
    np.testing.assert_allclose(found.detach(), values.detach(), rtol=tolerance, atol=tolerance, err_msg=name)
if rank == 0:
    print("equal")
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "strategy", "dtype", "tolerance"),
    [
        (1, "allreduce", "float64", "1e-10"),
        (2, "zero3", "float64", "1e-10"),
        (3, "zero1", "float64", "1e-10"),
        (4, "zero3", "float32", "1e-5"),
        (2, "allreduce", "float32", "1e-5"),
    ],
)
def test_unet_equals_one_process(launch, ranks, strategy, dtype, tolerance):
    ended = launch(ranks, SCRIPT, str(EXAMPLES), strategy, dtype, tolerance)
    assert (ended.code, ended.stdout.splitlines()[-1]) == (0, "equal"), ended.output
