"""The example of the documentation: a plain PyTorch script and its distributed version print the same losses."""

import difflib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import hpcdist
from harness import jobs, pages
from harness.jobs import LIMIT_S
from hpcdist.cli.runs.progress import checkpoints
from hpcdist.telemetry import hang
from hpcdist.training.data import SampleOrder
from hpcdist.training.recipe import recipe as recipes

torch = pytest.importorskip("torch")

PAGE = Path(hpcdist.__file__).parent / "docs" / "your-model.md"
MOST_LINES = 10
LAYOUTS = {
    "allreduce": (2, {}),
    "zero3": (2, {"HPCDIST_SET__PARALLEL__STRATEGY": "zero3"}),
    "pipeline": (2, {"HPCDIST_SET__PARALLEL__PIPELINE": "2"}),
}


# Rank 1 dies once in its first start. Then the ranks make steps until they are told to stop, and no more at last.
SCRIPT = """
import os, sys, time
from pathlib import Path
import numpy as np
import hpcdist
from hpcdist import models
from hpcdist.models.config import ModelConfig
from hpcdist.models.model import Model
from hpcdist.training.script import Training

assert hpcdist.allreduce(1, comm=hpcdist.init()) == 2  # recorded where the training will be
built = models.build(ModelConfig(kind="mlp", layers=1, hidden=8), "float32", features=5, classes=3)
model = Model(built.stages, "float32", tokens_per_sample=1)
keys = {"run.steps": 100000, "run.global_batch": 4, "checkpoint.every_steps": 4}
with Training(model, keys | ({"run.steps": int(sys.argv[1])} if sys.argv[1:] else {})) as training:
    first = training.done
    for step in training.steps:
        rng = np.random.default_rng(step)
        rows = rng.standard_normal((4, 5)).astype(np.float32), rng.integers(0, 3, 4)
        training.step(*(array[training.share] for array in rows))
        if training.rank == 1 and step == 9 and first == 0:
            os._exit(9)
        if step == first + 4 and first:
            Path(f"begun-{first}").touch()
        time.sleep(0.01)
print(f"rank {training.rank} ends at {training.done}")
"""


def examples():
    """Return the plain script and its distributed version, as the page shows them."""
    titles = ("train_plain.py", "train.py")
    return [next(block.text for block in pages.blocks(PAGE.read_text()) if block.title == title) for title in titles]


def losses(text):
    return [float(result) for result in re.findall(r"^step \d+: loss ([\d.]+)$", text, re.MULTILINE)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The losses of the plain script, and the file that it saves."""
    folder = tmp_path_factory.mktemp("plain")
    before = os.getcwd()
    printed = []
    os.chdir(folder)
    try:
        exec(compile(examples()[0], "train_plain.py", "exec"), {"print": lambda *texts: printed.extend(texts)})
    finally:
        os.chdir(before)
    return losses("\n".join(printed)), torch.load(folder / "model.pt")


def test_distributed_script_differs_in_few_lines():
    lines = difflib.ndiff(*(text.splitlines() for text in examples()))
    assert 0 < sum(line.startswith("+ ") for line in lines) <= MOST_LINES


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.full_except("allreduce")
@pytest.mark.matrix_except("allreduce")
def test_distributed_script_has_the_losses_of_the_plain_script(layout, expected, mpiexec, tmp_path):
    ranks, keys = LAYOUTS[layout]
    (tmp_path / "train.py").write_text(examples()[1])
    root = str(Path(hpcdist.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    done = mpiexec(ranks, ["train.py"], cwd=tmp_path, env={**keys, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout
    reference, saved = expected
    assert len(reference) == 5
    np.testing.assert_allclose(losses(done.stdout), reference, rtol=2e-4)  # of four digits after the point
    made = torch.load(tmp_path / "model.pt")
    assert made.keys() == saved.keys()
    for name, values in saved.items():
        assert float((made[name] - values).norm()) <= 1e-4 * float(values.norm()), name
    (run,) = (tmp_path / "runs").iterdir()
    assert recipes.load_stored(run / "recipe.toml").model.kind == "given"
    assert (run / "checkpoints" / "step-100" / "manifest.json").exists()


# Tokens and a mask by name, a DataLoader, and an optimizer that decays biases at a rate of their own.
SEVERAL = """
import torch
from torch import nn

torch.manual_seed(0)
tokens, mask, classes = torch.randint(11, (60, 4)), torch.rand(60, 4) < 0.7, torch.randint(3, (60,))

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)

    def forward(self, tokens, mask):
        return (self.table(tokens) * mask.unsqueeze(-1)).sum(dim=1)

model = nn.Sequential(Masked(), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
loss_of = nn.CrossEntropyLoss()
biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
others = [parameter for name, parameter in model.named_parameters() if not name.endswith("bias")]
optimizer = torch.optim.AdamW([{"params": others}, {"params": biases, "lr": 0.05, "weight_decay": 0.3}], lr=0.01)
dataset = [(tokens[i], mask[i], classes[i]) for i in range(60)]
"""
ON_RANKS = """
from hpcdist.errors import DataError
from hpcdist.training.pytorch import Training, recipe_of, wrap

keys = {"run.steps": 8, "run.global_batch": 16, "parallel.strategy": "zero3", "parallel.pipeline": 2}
keys |= {"parallel.microbatches": 2, "optimizer.clip_norm": 0.8, **recipe_of(optimizer)}
example = {"tokens": tokens[:1], "mask": mask[:1]}, None
with Training(wrap(model, loss_of, example=example), keys, out="run") as training:
    assert training.world == training.data_size * 2 and 0 <= training.data_rank < training.data_size
    batches = torch.utils.data.DataLoader(dataset, batch_sampler=training.sampler(dataset))
    for step, (some, masked, targets) in zip(training.steps, batches):
        if step == 2:  # the last that is compared without being asked for
            torch.manual_seed(1000 + training.rank)
            other = torch.randint(11, some.shape)
            try:
                training.step({"tokens": other, "mask": masked}, targets)
            except DataError as error:
                print(f"refused: {error}" if training.rank == 3 else "", flush=True)
        loss = training.step({"tokens": some, "mask": masked}, targets)
        if training.rank == 0:
            print(f"step {step + 1}: loss {loss:.6f}", flush=True)
    part = slice(training.data_rank, None, training.data_size)
    evaluated = training.evaluate({"tokens": tokens[part], "mask": mask[part]}, classes[part])
    if training.rank == 0:
        print(f"evaluated {evaluated:.6f}", flush=True)
"""


@pytest.mark.matrix
def test_sampler_and_masks_in_a_sharded_pipeline_match_plain_pytorch(mpiexec, tmp_path):
    """The losses match plain PyTorch. Ranks that draw samples independently are named and make no step."""
    (tmp_path / "train.py").write_text(SEVERAL + ON_RANKS)
    root = str(Path(hpcdist.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    done = mpiexec(4, ["train.py"], cwd=tmp_path, env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout
    scope = {}
    exec(compile(SEVERAL, "train_plain.py", "exec"), scope)
    model, dataset, optimizer = scope["model"], scope["dataset"], scope["optimizer"]
    expected = []
    for step in range(8):
        chosen = [dataset[index] for index in SampleOrder(0, 60).indices(16 * step, 16)]
        tokens, mask, classes = map(torch.stack, zip(*chosen, strict=True))
        optimizer.zero_grad()
        loss = scope["loss_of"](model[3](model[2](model[1](model[0](tokens, mask)))), classes)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.8)
        optimizer.step()
        expected.append(float(loss.detach()))
    np.testing.assert_allclose(losses(done.stdout), expected, rtol=2e-5)
    whole = scope["loss_of"](
        model[3](model[2](model[1](model[0](scope["tokens"], scope["mask"])))), scope["classes"]
    ).item()
    (evaluated,) = re.findall(r"^evaluated ([\d.]+)$", done.stdout, re.MULTILINE)
    assert float(evaluated) == pytest.approx(whole, rel=2e-5)
    refused = "step 3: rank(s) 2 have other inputs than rank 0, but these ranks all compute replica 0 and need the same"
    assert f"refused: {refused}" in done.stdout and "batch_sampler=training.sampler(dataset)" in done.stdout


@pytest.mark.full
def test_restarted_script_saves_at_a_signal_and_resumes(tmp_path, mpi):
    (tmp_path / "train.py").write_text(SCRIPT)
    run = [sys.executable, "-m", "hpcdist", "run", "-n", "2", "--out", "run"]
    log = tmp_path / "log"
    with log.open("w") as file:
        line = [*run, "--restarts", "1", "--", "python", "train.py"]
        process = subprocess.Popen(line, cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + LIMIT_S
        while not (begun := list(tmp_path.glob("begun-*"))) and process.poll() is None:
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 75, log.read_text()
    finally:
        process.terminate()
        process.wait(LIMIT_S)
    assert [path.name for path in begun] == ["begun-8"], "from the newest checkpoint"
    assert "start 1 of at most 2 ended with exit code 9" in log.read_text()
    saved = int(next(iter(checkpoints(tmp_path / "run"))).removeprefix("step-"))
    assert saved > 8
    line = [*run, "--resume", "auto", "--", "python", "train.py", str(saved + 2)]
    done = jobs.run(line, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"resumed from run/checkpoints/step-{saved} " in done.stderr.replace(f"{tmp_path}/", "")
    ends = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    assert ends == [f"rank {rank} ends at {saved + 2}" for rank in (0, 1)]


@pytest.mark.full_except(1)
@pytest.mark.parametrize("absent", [0, 1])
def test_hang_names_the_rank_that_never_begins_training(absent, tmp_path, mpi):
    waits = f"if hpcdist.init().rank == {absent}:\n    __import__('threading').Event().wait()\nbuilt ="
    (tmp_path / "train.py").write_text(SCRIPT.replace("built =", waits, 1))
    line = [sys.executable, "-m", "hpcdist", "run", "-n", "2", "--out", "run", "--", "python", "train.py"]
    done = jobs.run(line, cwd=tmp_path, env={"HPCDIST_DEADLINE_S": "3"})
    assert done.returncode == 1, done.stderr
    report = hang.analyse(hang.load(tmp_path / "run"))
    assert [(finding.kind, finding.ranks, finding.event.op) for finding in report.findings] == [
        ("absent", (absent,), "training")
    ]


# Ranks 0 and 3 train run a, rank 1 trains run b, and rank 2 trains nothing.
PARTS = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from hpcdist import models
from hpcdist.errors import UsageError
from hpcdist.models.config import ModelConfig
from hpcdist.models.model import Model
from hpcdist.training.script import Training


def wait_for(path):
    while not Path(path).exists():
        time.sleep(0.02)


def train(name, comm=None):
    strategy, steps, batch = {"a": ("zero2", 6, 4), "b": ("allreduce", 9, 6)}[name]
    built = models.build(ModelConfig(kind="mlp", layers=1, hidden=8), "float64", features=5, classes=3)
    keys = {"run.steps": steps, "run.global_batch": batch, "parallel.strategy": strategy, "precision.mode": "float64"}
    model = Model(built.stages, "float64", tokens_per_sample=1)
    with Training(model, keys, comm=comm, out=name if comm else f"{name}-alone", resume="auto") as training:
        for step in training.steps:
            rng = np.random.default_rng(step)
            rows = rng.standard_normal((batch, 5)), rng.integers(0, 3, batch)
            loss = training.step(*(array[training.share] for array in rows))
            if training.rank == 0:
                print(f"loss {name} {step} {loss:.15f}", flush=True)
            if comm and step == 0:  # both runs are in their steps at the same time
                Path(f"{name}-begun").touch()
                wait_for("b-begun" if name == "a" else "a-begun")
            if comm and name == "a" and step == 2 and training.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if comm and name == "b" and step == 5:  # goes on after the other run has stopped
                wait_for("a/checkpoints/step-4")
    Path(f"{name}-ended").touch()


if sys.argv[1:]:
    train(sys.argv[1])
else:
    from mpi4py import MPI

    name = "ab a"[MPI.COMM_WORLD.rank] if MPI.COMM_WORLD.size == 4 else ""
    comm = MPI.COMM_WORLD.Split(" ab".index(name) or MPI.UNDEFINED)
    if comm:
        train(name, comm)
    else:
        for wrong, error in ((comm, "COMM_NULL"), (MPI.COMM_SELF, "needs out")):
            try:
                Training(None, comm=wrong)
            except UsageError as refusal:
                assert error in str(refusal), refusal
            else:
                raise AssertionError(error)
        wait_for("b-ended")
"""


@pytest.mark.full
def test_parts_of_the_ranks_train_at_the_same_time(mpiexec, tmp_path):
    (tmp_path / "train.py").write_text(PARTS)
    environment = {"HPCDIST_RUN_DIR": str(tmp_path / "launcher")}
    stopped, resumed = (mpiexec(4, ["train.py"], cwd=tmp_path, env=environment) for _ in range(2))
    assert stopped.returncode == 75, stopped.stdout
    assert (resumed.returncode, (tmp_path / "launcher").exists()) == (0, False), resumed.stdout
    printed = re.findall(r"loss (\w) (\d) (\S+)", stopped.stdout + resumed.stdout)
    alone = [jobs.run([sys.executable, "train.py", name], cwd=tmp_path).stdout for name in "ab"]
    expected = re.findall(r"loss (\w) (\d) (\S+)", "".join(alone))
    del expected[3]  # the step that saves and stops returns no loss
    assert [row[:2] for row in sorted(printed)] == [row[:2] for row in expected]
    assert [float(row[2]) for row in sorted(printed)] == pytest.approx([float(row[2]) for row in expected], rel=1e-12)


@pytest.mark.full
def test_error_on_a_part_of_the_ranks_ends_the_job_and_is_shown_once(tmp_path, mpi):
    begin = "loss = training.step("
    fails = (
        f"if comm and name == 'a' and step == 2:\n                raise UsageError('no more data')\n            {begin}"
    )
    endless = PARTS.replace(begin, fails, 1).replace('"a/checkpoints/step-4"', '"never"')
    (tmp_path / "train.py").write_text(endless)
    done = jobs.hpcdist("run", "-n", "4", "--", "python", "train.py", cwd=tmp_path)
    output = done.stdout + done.stderr
    assert done.returncode == 2, output
    assert output.count("UsageError: no more data") == 1 and "rank 0 failed: exit code 2" in output, output
