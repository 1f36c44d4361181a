"""The programs in hpcdist/docs/examples, as a reader starts them on two ranks."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

import hpcdist
from harness import jobs
from hpcdist.checkpoint import state
from hpcdist.comm.threads.communicator import solo
from hpcdist.telemetry.metrics import step_metrics

EXAMPLES = Path(hpcdist.__file__).parent / "docs" / "examples"
ROOT = str(EXAMPLES.parents[2])

pytestmark = pytest.mark.full


def start(mpiexec, folder, *words, ranks=2, **keys):
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH", "")]))
    done = mpiexec(ranks, [str(EXAMPLES / words[0]), *words[1:]], cwd=folder, env={"PYTHONPATH": path, **keys})
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_mpi4py_example_resumes_from_its_checkpoint(mpiexec, tmp_path):
    assert "heat 25600.0 after 20 steps, 0 of them in earlier runs" in start(mpiexec, tmp_path, "heat_mpi4py.py", "20")
    assert "after 30 steps, 20 of them in earlier runs" in start(mpiexec, tmp_path, "heat_mpi4py.py", "30", ranks=3)


@pytest.mark.parametrize("key", ["PARALLEL__STRATEGY=zero3", "PARALLEL__PIPELINE=2"])
@pytest.mark.matrix_except("PARALLEL__PIPELINE=2")
def test_picture_example_learns_to_classify(mpiexec, tmp_path, key):
    pytest.importorskip("torch")
    name, _, value = key.partition("=")
    shown = start(mpiexec, tmp_path, "pictures.py", **{f"HPCDIST_SET__{name}": value})
    assert float(re.search(r"held out: loss ([\d.]+)", shown)[1]) < 0.6  # ln 2 knows nothing


def test_hugging_face_model_example_learns_a_text(mpiexec, tmp_path, text):
    transformers = pytest.importorskip("transformers")
    shown = start(mpiexec, tmp_path, "finetune.py", str(text), HPCDIST_SET__PARALLEL__STRATEGY="zero2")
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", shown, re.MULTILINE)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "finetuned")


def test_hugging_face_trainer_example_learns_a_text(mpiexec, tmp_path, text):
    pytest.importorskip("accelerate")
    shown = start(mpiexec, tmp_path, "trainer.py", str(text))
    first, last, ranks = re.search(r"loss ([\d.]+) to ([\d.]+) on (\d) ranks", shown).groups()
    assert float(last) < float(first) and ranks == "2"
    assert (tmp_path / "trained" / "model.safetensors").exists()


def test_hugging_face_trainer_example_stops_and_continues_with_the_same_bits(tmp_path, text):
    pytest.importorskip("accelerate")
    last_weights = []
    for name, stops in (("whole", False), ("parts", True)):
        folder = tmp_path / name
        (folder / "run").mkdir(parents=True)
        line = ["run", "-n", 2, "--out", "run", "--", "python", EXAMPLES / "trainer.py", text]
        if stops:
            (folder / "run/stop").touch()
            assert jobs.hpcdist(*line, cwd=folder).returncode == 75
            assert [path.name for path in (folder / "trained").glob("checkpoint-*")] == ["checkpoint-1"]
        done = jobs.hpcdist(*line, cwd=folder)
        assert done.returncode == 0, done.stderr
        last_weights.append((folder / "trained/model.safetensors").read_bytes())
        assert "samples/s" in jobs.hpcdist("report", folder / "run").stdout
    assert last_weights[0] == last_weights[1]


# Runs an example until a rank calls a function with the step 17 as its argument: the rank dies or waits there.
INTERRUPTED = """
import os, runpy, signal, sys, time
from pathlib import Path
import torch
import hpcdist.torch

_, how, victim, name, *sys.argv = sys.argv

def interrupt():
    if int(os.environ["RANK"]) != int(victim) or Path("interrupted").exists():
        return
    Path("interrupted").touch()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while not Path("signalled").exists():
        time.sleep(0.01)

if name == "log":
    log = hpcdist.torch.log

    def interrupted_log(step, **values):
        if step == 17:
            interrupt()
        log(step, **values)

    hpcdist.torch.log = interrupted_log
else:
    import transformers

    save = transformers.Trainer._save_rng_state

    def interrupted_save(self, folder):
        if self.state.global_step == 20:
            interrupt()
        save(self, folder)

    transformers.Trainer._save_rng_state = interrupted_save
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def line_of(script, *words, out="run", ranks=2, interrupted=()):
    """Return the command that runs an example, or an example that is ``interrupted``."""
    before = ["interrupted.py", *interrupted] if interrupted else []
    line = ["run", "-n", ranks, "--restarts", 2, "--out", out, "--", "python", *before, EXAMPLES / script]
    return jobs.command(*line, *words)


def completed(line, folder):
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH", "")]))
    (folder / "interrupted.py").write_text(INTERRUPTED)
    done = jobs.run(line, cwd=folder, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def assert_same_state(one, two):
    """Assert that the newest checkpoints have the same bits: model, average, optimizer, schedule and random state."""
    left, right = (state.load(out, comm=solo()) for out in (one, two))
    assert left.keys() == right.keys()
    for saved in (left, right):
        saved["random"] = saved["random"][:, :5056]  # PyTorch's: the script does not seed numpy and Python
    for name, value in left.items():
        assert np.array_equal(value, right[name]) if isinstance(value, np.ndarray) else value == right[name], name
    assert {"random", "schedule", "average/module.stem.weight", "model/stem.weight"} <= left.keys()


def logged(out):
    """Return the logged losses of all steps."""
    return step_metrics.read(out / "metrics.h5").steps["loss"]


UNET = ("unet.py", "--norm", "batch")  # statistics of BatchNorm differ by rank


@pytest.fixture(scope="module")
def whole_unet(tmp_path_factory):
    """Last line and run directory of an uninterrupted run of the U-Net."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("unet")
    output = completed(line_of(*UNET), folder).stdout
    ratios = [float(ratio) for ratio in re.findall(r"PSNR ([\d.]+) dB", output)]
    assert len(ratios) == 5 and ratios[-1] > ratios[0] + 1, output
    return output.splitlines()[-1], folder / "run"


@pytest.mark.full
def test_unet_example_killed_at_a_step_continues_with_the_same_bits(tmp_path, whole_unet):
    last_line, whole = whole_unet
    done = completed(line_of(*UNET, interrupted=("kill", 1, "log")), tmp_path)
    assert re.findall("from step .*", done.stdout) == ["from step 0 on 2 ranks", "from step 10 on 2 ranks"]
    assert done.stdout.splitlines()[-1] == last_line
    assert np.array_equal(logged(tmp_path / "run"), logged(whole))
    assert_same_state(tmp_path / "run", whole)


@pytest.mark.full
def test_unet_example_stops_at_sigterm_and_continues_with_the_same_bits(tmp_path, whole_unet):
    last_line, whole = whole_unet
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    line = line_of(*UNET, interrupted=("wait", 0, "log"))
    with subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        jobs.until((tmp_path / "interrupted").exists, "step 17", process)
        process.send_signal(signal.SIGTERM)
        (tmp_path / "signalled").touch()
        process.communicate(timeout=jobs.LIMIT_S)
    assert process.returncode == 75
    saved = jobs.newest_step(tmp_path / "run")
    assert saved in (17, 18)
    done = completed(line, tmp_path)
    assert done.stdout.splitlines()[0] == f"from step {saved} on 2 ranks"
    assert done.stdout.splitlines()[-1] == last_line
    assert_same_state(tmp_path / "run", whole)


# The U-Net without DDP and hpcdist: the whole batch in one pass on one process.
ONE_PROCESS = """
import sys
from argparse import Namespace
sys.path.insert(0, sys.argv[1])
import torch
import unet
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

dtype, steps = getattr(torch, sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
model = unet.UNet(1, Namespace(norm="group", dropout=0.0, width=16)).to(dtype)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
optimizer = torch.optim.AdamW(unet.groups(model), lr=2e-3)
data = unet.NoisyPictures(unet.discs_and_squares(640)[:-128].to(dtype))
losses = []
for step in range(steps):
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 2e-3 * unet.rate_factor(step, 10, steps)
    epoch, within = divmod(step, 16)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(epoch))
    samples = [data[step, index] for index in order[within * 32 : within * 32 + 32].tolist()]
    noisy, level, clean = (torch.stack(part) for part in zip(*samples))
    loss = (model(noisy, level) - clean).square().mean()
    losses.append(loss.item())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    average.update_parameters(model)
torch.save([losses, model.state_dict(), average.module.state_dict()], sys.argv[4])
"""


@pytest.mark.full
@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.matrix_except("float64")
def test_unet_example_on_any_number_of_ranks_equals_one_process(tmp_path, precision):
    torch = pytest.importorskip("torch")
    steps, tolerance = 12, {"float64": 1e-10, "float32": 1e-5}[precision]
    done = jobs.python(
        ONE_PROCESS, EXAMPLES, precision, steps, tmp_path / "one.pt", env=os.environ | {"PYTHONPATH": ROOT}
    )
    assert done.returncode == 0, done.stderr
    losses, parameters, averages = torch.load(tmp_path / "one.pt")
    for ranks in (1, 2, 4):
        words = ("--dropout", 0, "--precision", precision, "--steps", steps, "--every", 50)
        completed(line_of("unet.py", *words, out=f"ranks-{ranks}", ranks=ranks), tmp_path)
        saved = state.load(tmp_path / f"ranks-{ranks}", comm=solo())
        np.testing.assert_allclose(logged(tmp_path / f"ranks-{ranks}"), losses, rtol=tolerance)
        for kind, expected in (("model/", parameters), ("average/module.", averages)):
            for name, value in expected.items():
                error = np.linalg.norm(saved[kind + name] - value.numpy()) / np.linalg.norm(value)
                assert error <= tolerance, (ranks, kind, name, error)


@pytest.mark.full
def test_hugging_face_trainer_example_killed_in_a_save_continues_with_the_same_bits(tmp_path, text):
    """The incomplete checkpoint is not used."""
    pytest.importorskip("accelerate")
    weights = []
    for name, interrupted in (("whole", ()), ("killed", ("kill", 0, "save"))):
        (folder := tmp_path / name).mkdir()
        done = completed(line_of("trainer.py", text, interrupted=interrupted), folder)
        weights.append((folder / "trained/model.safetensors").read_bytes())
    assert "checkpoint-10" in done.stderr and (folder / "interrupted").exists()
    assert weights[0] == weights[1]


def test_sweep_example_runs_directly_and_as_a_job_array(tmp_path):
    shutil.copy(EXAMPLES / "sweep.toml", tmp_path)
    listed = jobs.hpcdist("bench", "sweep", "sweep.toml", "--list", cwd=tmp_path)
    assert listed.returncode == 0 and len(listed.stdout.splitlines()) >= 9, listed
    words = ("--array", "sweep.toml", "--nodes", "1", "--ranks-per-node", "2", "--site", "slurm-openmpi", "--dry-run")
    script = jobs.hpcdist("submit", *words, cwd=tmp_path)
    assert script.returncode == 0 and "#SBATCH --array=0-8" in script.stdout, script
