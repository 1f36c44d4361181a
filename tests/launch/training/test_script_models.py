"""Scripts with BatchNorm, frozen parameters, schedulers and skips under `Training`, against PyTorch in one process."""

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

kind, strategy, pipeline, out, stop = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
STEPS, BATCH, CUT, BACKEND = 8, 24, kind == "unet", "aot_eager"

class Block(nn.Module):
    def __init__(self, inputs, outputs, norm):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs) if norm == "batch" else nn.GroupNorm(2, outputs)
        self.time, self.act = nn.Linear(8, outputs), nn.SiLU(inplace=True)

    def forward(self, x, time):
        return self.act(self.norm(self.conv(x)) + self.time(time)[:, :, None, None])

class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, 8))
        self.down = nn.ModuleList([Block(2, 4, "batch"), Block(4, 8, "group")])
        self.mid, self.pool = Block(8, 8, "batch"), nn.MaxPool2d(2)
        self.up = nn.ModuleList([Block(16, 8, "group"), Block(12, 4, "batch")])
        self.head = nn.Conv2d(4, 2, 1)
        self.scale = nn.Parameter(torch.ones(2, 1, 1))
        self.up[1].time.bias.requires_grad_(False)

    def forward(self, x, time):
        height, width = x.shape[-2:]
        time, skips = self.time(time), []
        for block in self.down:
            x = block(x, time)
            skips.append(x)
            x = self.pool(x)
        x = self.mid(x, time)
        for block in self.up:
            skip = skips.pop()
            x = nn.functional.interpolate(x, size=skip.shape[-2:])
            x = block(torch.cat([x, skip], dim=1), time)
        return (self.head(x) * self.scale).view(-1, 2, height, width)

def build(seed):
    torch.manual_seed(seed)
    if CUT:
        return UNet().double()
    blocks = [nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.GELU())]
    blocks += [nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16)]
    model = nn.Sequential(*blocks, nn.GELU(), nn.Linear(16, 1)).double()
    model[1].weight.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    return model

def batch(step):
    rng = np.random.default_rng(step)
    if CUT:
        x, time = (torch.from_numpy(rng.normal(size=(BATCH, *shape))) for shape in [(2, 8, 8), (1,)])
        return (x, time), x.square() * time[:, :, None, None]
    x = torch.from_numpy(rng.normal(size=(BATCH, 6)))
    return (x,), x.square().sum(1, keepdim=True)

def share(step):
    x, y = batch(step)
    x = tuple(part[training.share] for part in x)
    return x if CUT else x[0], y[training.share]

model = build(0 if hpcdist.init().rank == 0 else 1)  # rank 0 provides the values
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
recipe = {**recipe_of(optimizer), "parallel.strategy": strategy, "parallel.pipeline": pipeline}
recipe |= {"run.steps": STEPS, "run.global_batch": BATCH, "precision.mode": "float64"}
losses = []
x, y = batch(0)
given = [torch.compile(child, backend=BACKEND) for child in model] if kind == "compiled" else model
wrapped = wrap(given, nn.functional.mse_loss, example=(x if CUT else x[0], y), cut=CUT)
training = Training(wrapped, recipe, out=out, resume="auto")
with training:
    for step in training.steps:
        if step == stop:
            break
        losses.append(training.step(*share(step)))
    evaluated = training.evaluate(*share(99))
    rank, replicas = training.rank, training.data_size
    peak = training._trainer.ledger.peak
if CUT and (strategy, pipeline) == ("zero3", 1):  # one stage would have the shard and the whole parameters
    whole = 8 * sum(parameter.numel() for parameter in model.parameters())
    assert peak["parameters"] < whole / replicas + 0.6 * whole, (peak, whole)
if stop < STEPS:
    sys.exit()
load(given, training.parameters())
graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] if kind == "compiled" else 0
assert 2 * (kind == "compiled") <= graphs <= 8, graphs
reference = build(0)
trained = [parameter for parameter in reference.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
copies = [build(0) for _ in range(replicas)]
expected = []
for step in range(STEPS):
    optimizer.zero_grad()
    total = 0.0
    x, y = batch(step)
    for copy, y, *x in zip(copies, y.chunk(replicas), *(part.chunk(replicas) for part in x)):
        for mine, theirs in zip(copy.parameters(), reference.parameters()):
            mine.data, mine.grad = theirs.data, None
        loss = nn.functional.mse_loss(copy(*x), y) / replicas
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
        np.testing.assert_allclose(evaluated, nn.functional.mse_loss(reference(*x), y).item(), rtol=1e-10)
    print("equal", len(losses))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "ranks", "strategy", "pipeline"),
    [
        ("chain", 2, "zero3", 1),
        ("chain", 1, "allreduce", 1),
        ("chain", 3, "zero1", 1),
        ("chain", 2, "zero1", 2),
        ("unet", 2, "zero1", 2),
        ("unet", 4, "zero3", 2),
        ("compiled", 2, "zero3", 1),
        ("compiled", 2, "allreduce", 2),
    ],
)
def test_batchnorm_and_frozen_parameters_match_pytorch_and_resume(launch, tmp_path, kind, ranks, strategy, pipeline):
    words = kind, strategy, str(pipeline), str(tmp_path / "run")
    ended = launch(ranks, SCRIPT, *words, "5")
    assert ended.code == 0, ended.output
    ended = launch(ranks, SCRIPT, *words, "8")
    assert (ended.code, ended.stdout.splitlines()[-1]) == (0, "equal 3"), ended.output
    stored = jobs.hpcdist("checkpoint", "show", tmp_path / "run").stdout
    assert "statistics" in stored and "1.weight" not in stored, stored


SYNCHRONISED = """
import sys
import numpy as np
import torch
from torch import nn
import hpcdist
from hpcdist.telemetry.metrics import side_tables
from hpcdist.training.pytorch import Training, load, recipe_of, wrap

STEPS = 4

def build(seed):
    torch.manual_seed(seed)
    blocks = [nn.Conv2d(2, 6, 3, bias=False), nn.BatchNorm2d(6), nn.GELU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(36, 1))

def batch(step, size, dtype):
    x = np.random.default_rng(step).normal(3.0, 2.0, size=(size, 2, 7, 7))
    return torch.from_numpy(x).to(dtype), torch.from_numpy((x**2).mean((1, 2, 3)))[:, None].to(dtype)

def train(out, strategy, pipeline, microbatches, size, mode):
    dtype, tolerance = getattr(torch, mode), 1e-10 if mode == "float64" else 1e-5
    plain = build(0).to(dtype)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(build(hpcdist.init().rank).to(dtype))  # rank 0 provides the values
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    recipe = recipe_of(optimizer, scheduler) | {
        "parallel.strategy": strategy, "parallel.pipeline": pipeline, "parallel.microbatches": microbatches,
        "run.steps": STEPS, "run.global_batch": size, "precision.mode": mode,
    }
    x, y = batch(99, size, dtype)
    losses, logged = [], []
    with Training(wrap(model, nn.functional.mse_loss, example=x), recipe, out=out) as training:
        for step in training.steps:
            x, y = batch(step, size, dtype)
            mine = x[training.share]
            losses.append(training.step(mine, y[training.share]))
            training.log(mean=mine.mean() if len(mine) else 0, samples=len(mine))  # of all replicas
            logged.append(x.mean().item())
        x, y = batch(99, size, dtype)
        evaluated, replicas = training.evaluate(x[training.share], y[training.share]), training.data_size
    load(model, training.parameters())
    cuts = [np.array_split(share, microbatches) for share in np.array_split(np.arange(size), replicas)]
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    expected = []
    for step in range(STEPS):
        x, y = batch(step, size, dtype)
        optimizer.zero_grad()
        total = 0.0
        for parts in zip(*cuts):  # one micro-batch of all replicas
            rows = np.concatenate(parts)
            if len(rows):
                loss = nn.functional.mse_loss(plain(x[rows]), y[rows], reduction="sum") / size
                loss.backward()
                total += loss.item()
        optimizer.step()
        scheduler.step()
        expected.append(total)
    np.testing.assert_allclose(losses, expected, rtol=tolerance)
    values = side_tables.read(training.path / "metrics.h5").observed.series["logged_value[mean]"]
    np.testing.assert_allclose(values.value, logged, rtol=tolerance)
    for (name, mine), theirs in zip(model.state_dict().items(), plain.state_dict().values()):
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance, err_msg=name)
    x, y = batch(99, size, dtype)
    np.testing.assert_allclose(evaluated, nn.functional.mse_loss(plain.eval()(x), y).item(), rtol=tolerance)

for number, case in enumerate(sys.argv[2:]):
    strategy, pipeline, microbatches, size, mode = case.split()
    train(f"{sys.argv[1]}/{number}", strategy, int(pipeline), int(microbatches), int(size), mode)
    print("equal", hpcdist.init().rank, flush=True)
"""


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (3, ["zero3 1 1 8 float64", "zero1 1 3 7 float64"]),  # the second replica has no sample of the last micro-batch
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                (1, ["allreduce 1 2 8 float64"]),
                (2, ["allreduce 1 1 9 float32", "zero2 1 3 4 float64", "parameter_server 1 1 8 float64"]),
                (4, ["zero1 2 3 3 float64", "zero3 1 1 10 float64", "allreduce 4 2 8 float64"]),
            ]
        ),
    ],
)
def test_synchronised_batchnorm_scheduler_and_log_equal_one_process(launch, tmp_path, ranks, cases):
    ended = launch(ranks, SYNCHRONISED, str(tmp_path), *cases)
    assert (ended.code, ended.stdout.count("equal")) == (0, ranks * len(cases)), ended.output
