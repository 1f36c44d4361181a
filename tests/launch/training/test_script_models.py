"""Models of scripts with BatchNorm and frozen parameters under `Training`, against PyTorch in one process."""

import pytest

from harness import jobs

torch = pytest.importorskip("torch")

SCRIPT = """
import sys
import numpy as np
import torch
from torch import nn
import hpcdist
from hpcdist.training.pytorch import Training, load, recipe_of, wrap

strategy, pipeline, out, stop = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
STEPS, BATCH = 8, 24

def build(seed):
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.GELU())]
    blocks += [nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16)]
    model = nn.Sequential(*blocks, nn.GELU(), nn.Linear(16, 1)).double()
    model[1].weight.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    return model

def batch(step):
    x = torch.from_numpy(np.random.default_rng(step).normal(size=(BATCH, 6)))
    return x, x.square().sum(1, keepdim=True)

model = build(0 if hpcdist.init().rank == 0 else 1)  # rank 0 provides the values
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
recipe = {**recipe_of(optimizer), "parallel.strategy": strategy, "parallel.pipeline": pipeline}
recipe |= {"run.steps": STEPS, "run.global_batch": BATCH, "precision.mode": "float64"}
losses = []
training = Training(wrap(model, nn.functional.mse_loss, example=batch(0)), recipe, out=out, resume="auto")
with training:
    for step in training.steps:
        if step == stop:
            break
        x, y = batch(step)
        losses.append(training.step(x[training.share], y[training.share]))
    x, y = batch(99)
    evaluated = training.evaluate(x[training.share], y[training.share])
    rank, replicas = training.rank, training.data_size
if stop < STEPS:
    sys.exit()
load(model, training.parameters())
reference = build(0)
trained = [parameter for parameter in reference.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
copies = [build(0) for _ in range(replicas)]
expected = []
for step in range(STEPS):
    optimizer.zero_grad()
    total = 0.0
    for copy, x, y in zip(copies, *(part.chunk(replicas) for part in batch(step))):
        for mine, theirs in zip(copy.parameters(), reference.parameters()):
            mine.data, mine.grad = theirs.data, None
        loss = nn.functional.mse_loss(copy(x), y) / replicas
        loss.backward()
        total += loss.item()
        for mine, theirs in zip(copy.parameters(), reference.parameters()):
            if theirs.requires_grad:
                theirs.grad = mine.grad.clone() if theirs.grad is None else theirs.grad + mine.grad
    optimizer.step()
    expected.append(total)
np.testing.assert_allclose(losses, expected[-len(losses):], rtol=1e-10)
if rank == 0:
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters()):
        if pipeline == 1 or theirs.requires_grad:
            np.testing.assert_allclose(mine.detach(), theirs.detach(), rtol=1e-10, atol=1e-12, err_msg=name)
    if pipeline == 1:
        for name, mine in model.named_buffers():
            mean = torch.stack([dict(copy.named_buffers())[name].double() for copy in copies]).mean(0)
            np.testing.assert_allclose(mine, mean, rtol=1e-10, atol=1e-12, err_msg=name)
            dict(reference.named_buffers())[name].copy_(mean)
        reference.eval()
        x, y = batch(99)
        np.testing.assert_allclose(evaluated, nn.functional.mse_loss(reference(x), y).item(), rtol=1e-10)
    print("equal", len(losses))
"""


@pytest.mark.parametrize(
    ("ranks", "strategy", "pipeline"),
    [
        (2, "zero3", 1),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [(1, "allreduce", 1), (3, "zero1", 1), (2, "zero1", 2)]
        ),
    ],
)
def test_batchnorm_and_frozen_parameters_match_pytorch_and_resume(launch, tmp_path, ranks, strategy, pipeline):
    words = strategy, str(pipeline), str(tmp_path / "run")
    ended = launch(ranks, SCRIPT, *words, "5")
    assert ended.code == 0, ended.output
    ended = launch(ranks, SCRIPT, *words, "8")
    assert (ended.code, ended.stdout.splitlines()[-1]) == (0, "equal 3"), ended.output
    stored = jobs.hpcdist("checkpoint", "show", tmp_path / "run").stdout
    assert "statistics" in stored and "1.weight" not in stored, stored
