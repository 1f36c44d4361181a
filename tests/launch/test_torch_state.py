"""Checkpoints, restarts and stop requests of PyTorch scripts with a training loop of their own."""

import json
import sys

import numpy as np
import pytest

from harness import jobs
from hpcdist.telemetry.metrics import side_tables

torch = pytest.importorskip("torch")

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import hpcdist.torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

style, out, stop = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("hpcdist")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = [torch.nn.Linear(7, 13), torch.nn.LayerNorm(13), torch.nn.GELU(), torch.nn.Linear(13, 1)]
if style == "ddp":
    layers.insert(1, torch.nn.BatchNorm1d(13))
model = torch.nn.Sequential(*layers).double()
if style == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)  # statistics of BatchNorm differ by rank
else:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards")) if style == "mesh" else None
    for part in (model[0], model[3], model):
        fully_shard(part, mesh=mesh or init_device_mesh("cpu", (world,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
random_state = hpcdist.torch.RandomState()
torch.manual_seed(1)
try:
    hpcdist.torch.save(out, {"a/b": torch.ones(2), "a": {"b": torch.zeros(2)}})
    raise AssertionError
except hpcdist.errors.UsageError as error:
    assert "two tensors of the state have the name 'a/b'" in str(error)
try:
    hpcdist.torch.load(out, {"step": 0, "average": object()})
    raise AssertionError
except hpcdist.errors.UsageError as error:
    assert "average is an object of type object" in str(error)
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "random": random_state}
mean = torch.zeros(3, dtype=torch.bool)
saved = hpcdist.torch.load(out, state | {"step": 0, "kinds": None, "mean": mean})
begin = saved["step"] if saved else 0
if saved:
    assert saved["kinds"] == [1, (2, "x"), {3: torch.tensor(2.5)}], saved
    assert saved["mean"] is mean and mean.tolist() == [False, True, False]
for step in range(begin, stop):
    x = torch.randn(12, 7, dtype=torch.float64)
    y = x.square().sum(1, keepdim=True)
    rows = slice(rank * 12 // world, (rank + 1) * 12 // world)
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x[rows]), y[rows])
    loss.backward()
    optimizer.step()
    scheduler.step()
more = {"kinds": [1, (2, "x"), {3: torch.tensor(2.5)}], "mean": torch.tensor([rank == 9, True, False])}
path = hpcdist.torch.save(out, state | {"step": stop} | more)
dist.all_reduce(loss, dist.ReduceOp.AVG)
if rank == 0:
    print(path.name, begin, loss.item().hex(), scheduler.get_last_lr()[0])
dist.destroy_process_group()
"""


def losses(done):
    assert done.code == 0, done.output
    name, begin, loss, rate = done.stdout.split()
    return name, int(begin), float.fromhex(loss), float(rate)


@pytest.mark.parametrize("style", ["ddp", pytest.param("fsdp", marks=pytest.mark.full)])
def test_state_of_a_script_continues_with_the_same_bits_and_on_other_ranks(launch, tmp_path, style):
    whole = losses(launch(2, SCRIPT, style, tmp_path / "whole", "4"))
    assert losses(launch(2, SCRIPT, style, tmp_path / "parts", "2"))[1] == 0
    _, begin, loss, rate = losses(launch(2, SCRIPT, style, tmp_path / "parts", "4"))
    assert (begin, loss, rate) == (2, *whole[2:])
    (tmp_path / "parts/checkpoints/step-2").rename(tmp_path / "parts/checkpoints/step-9")  # the newest
    _, begin, loss, rate = losses(launch(1, SCRIPT, style, tmp_path / "parts", "4"))
    assert (begin, rate) == (2, whole[3])
    if style != "ddp":  # BatchNorm makes the loss depend on the number of ranks
        assert abs(loss - whole[2]) <= 1e-12 * abs(whole[2])
    listing = jobs.hpcdist("checkpoint", "verify", tmp_path / "whole").stdout
    assert "complete" in listing
    assert "hpcdist.torch.load" in jobs.hpcdist("checkpoint", "export", tmp_path / "whole", tmp_path / "x.pt").stderr


@pytest.mark.full
def test_state_on_a_mesh_of_replicas_and_shards_continues(launch, tmp_path):
    whole = losses(launch(2, SCRIPT, "fsdp", tmp_path / "whole", "4"))
    losses(launch(4, SCRIPT, "mesh", tmp_path / "parts", "2"))
    _, begin, loss, _ = losses(launch(2, SCRIPT, "fsdp", tmp_path / "parts", "4"))
    assert begin == 2 and abs(loss - whole[2]) <= 1e-12 * abs(whole[2])


BACKGROUND = """
import copy
import torch
import torch.distributed as dist
import hpcdist.torch

dist.init_process_group("hpcdist")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 200))
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
for step in range(1, 7):
    model(torch.randn(4, 300)).square().sum().backward()
    optimizer.step()
    if step in (2, 4):
        path = hpcdist.torch.save("out", state | {"step": step}, step=step, background=True)
        assert not path.exists()  # it is committed by a later collective call
        saved = copy.deepcopy(model.state_dict())
    if step == 3:
        while not hpcdist.allreduce(float(path.exists()), "min"):  # equal on all ranks
            assert not hpcdist.torch.should_stop()
    if step == 4:
        model(torch.randn(4, 300)).square().sum().backward()
        optimizer.step()  # while the state is written
        hpcdist.torch.finish_saves()
        assert path.exists()
        assert hpcdist.torch.load("out", state | {"step": 0})["step"] == 4
        assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
hpcdist.torch.save("out", state | {"step": step}, step=step, background=True)
dist.destroy_process_group()
"""


def test_background_save_holds_the_state_of_its_step(launch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = launch(2, BACKGROUND)
    assert ended.code == 0, ended.output
    listing = jobs.hpcdist("checkpoint", "verify", tmp_path / "out")
    assert listing.returncode == 0 and listing.stdout.count("complete") >= 2, listing.stdout
    assert sorted(path.name for path in (tmp_path / "out/checkpoints").glob("step-*")) == ["step-4", "step-6"]


SIGNALLED = """
import multiprocessing, os, signal, time
import torch.distributed as dist
import hpcdist.torch

dist.init_process_group("hpcdist")
fork = multiprocessing.get_context("fork")
is_running = fork.Event()

def work():
    is_running.set()
    time.sleep(100)

child = fork.Process(target=work)
child.start()
is_running.wait()
child.terminate()
child.join(50)
assert child.exitcode == -signal.SIGTERM, child.exitcode  # handlers are not inherited
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGTERM)  # before the first call of should_stop
steps = list(hpcdist.torch.until_stop(range(100)))
hpcdist.torch.exit_if_stopped(lambda: print("saved after", len(steps), flush=True))
"""


def test_signal_after_init_process_group_stops_the_first_iteration(launch):
    ended = launch(2, SIGNALLED)
    assert (ended.code, ended.stdout) == (75, "saved after 1\n" * 2), ended.output
    assert ended.output.count("hpcdist: stopped at a stop request; start the same command again to continue") == 1


OWN_FORMAT = """
import os
import sys
from pathlib import Path
import hpcdist.torch

world = hpcdist.init()
out = Path(os.environ["HPCDIST_RUN_DIR"])
out.mkdir(exist_ok=True)
path = out / "model.txt"
step = int(path.read_text()) if path.exists() else 0
while step < 5:
    step += 1
    if world.rank == 0 and sys.argv[1] != "nothing":
        path.write_text(str(step))
    if sys.argv[1] == "reported":
        hpcdist.torch.saved(path, step)
    if step % 2 == 0:
        world.barrier()
        os.kill(os.getpid(), 9)
if world.rank == 0:
    print("done")
"""


@pytest.mark.full
@pytest.mark.parametrize("mode", ["file", "reported", "nothing"])
def test_checkpoint_in_a_format_of_the_script_counts_as_progress_of_restarts(tmp_path, mode):
    (tmp_path / "program.py").write_text(OWN_FORMAT)
    words = ["run", "-n", "1", "--restarts", "4", "--out", "out", "--", "python", "program.py", mode]
    done = jobs.run([sys.executable, "-m", "hpcdist", *words], cwd=tmp_path)
    if mode == "nothing":
        assert done.returncode == 137 and "2 starts in a row made no new checkpoint" in done.stderr, done.stderr
        return
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert ("a new file in" in done.stderr) == (mode == "file")
    assert f"start 3 follows at once, from {'model.txt' if mode == 'file' else tmp_path}" in done.stderr.replace(
        str(tmp_path / "out"), str(tmp_path)
    )


LIGHTNING = """
import os, sys, signal
import torch
import torch.distributed as dist
import lightning.pytorch as pl
import hpcdist.torch

dist.init_process_group("hpcdist")
out, stop = sys.argv[1], int(sys.argv[2])

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, index):
        self.log("norm", self.layer.weight.norm())
        if self.global_step == stop and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return (self.layer(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch, index):
        self.log("val_loss", (self.layer(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

pl.seed_everything(0, verbose=False)
inputs = torch.randn(96, 8)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=4)
path = f"{out}/last.ckpt"
trainer = pl.Trainer(
    accelerator="cpu", strategy="ddp", devices=dist.get_world_size(), max_epochs=2, accumulate_grad_batches=2,
    callbacks=[hpcdist.torch.lightning_callback(path)], logger=False, enable_progress_bar=False,
    enable_model_summary=False, default_root_dir=out,
)
model = Model()
trainer.fit(model, loader, loader, ckpt_path=path if os.path.exists(path) else None)
assert dist.get_backend() == "hpcdist"
print(trainer.global_step, model.layer.weight.sum().item().hex(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.full
def test_lightning_stops_resumes_with_the_same_bits_and_logs(tmp_path):
    pytest.importorskip("lightning", reason="pip install lightning")
    (tmp_path / "script.py").write_text(LIGHTNING)

    def run(folder, stop):
        words = ["run", "-n", "2", "--out", folder, "--", "python", "script.py", folder, stop]
        return jobs.run([sys.executable, "-m", "hpcdist", *words], cwd=tmp_path)

    whole = run("whole", "-1")
    assert whole.returncode == 0, whole.stderr
    stopped = run("parts", "5")
    assert stopped.returncode == 75, stopped.stderr
    progress = json.loads((tmp_path / "parts/progress.json").read_text())
    assert progress == {"checkpoint": "parts/last.ckpt", "step": 6}
    resumed = run("parts", "-1")
    assert resumed.returncode == 0 and resumed.stdout == whole.stdout, resumed.stderr
    runs = [side_tables.read(tmp_path / folder / "metrics.h5") for folder in ("whole", "parts")]
    for run_data in runs:
        assert run_data.steps["step"].tolist() == [*range(1, 13)]
        assert set(run_data.steps["tokens"].tolist()) == {16}
        assert "logged_value[norm]" in run_data.observed.series
    assert len(runs[0].sample.evaluations["val_loss"]) == 2
    assert np.array_equal(runs[0].steps["loss"], runs[1].steps["loss"])
