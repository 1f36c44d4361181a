"""One attack of each kind on real jobs: kills, deaths, signals, hangs, damaged and hostile files, odd environments.


Each test is the small form of a campaign that another file repeats many times. Results are compared with an independent
reference: a multi-layer perceptron in float64 on one process, which shares no code with the package.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from safetensors.numpy import load_file

from harness import jobs
from harness.jobs import LIMIT_S, newest_step, until
from hpcdist.checkpoint.listing import verify
from hpcdist.comm.launch import mpirun

ROWS, FEATURES, CLASSES, RATE = 30, 7, 5, 0.05
TABLE = (
    *("model.kind=mlp", "model.layers=2", "model.hidden=11", "model.activation=relu", "precision.mode=float64"),
    *("optimizer.name=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0", "optimizer.clip_norm=0"),
    *(f"optimizer.learning_rate={RATE}", "optimizer.decay=constant", "optimizer.warmup_steps=0"),
    *("data.validation_fraction=0", f"run.global_batch={ROWS}", "energy.sources=none"),
    *("communication.algorithm=ring", "checkpoint.every_steps=1", "checkpoint.keep=100"),
)
LAYOUTS = {
    "zero3 on 3 ranks": (3, ["parallel.strategy=zero3"]),
    "zero1 in micro-batches on 2 ranks": (2, ["parallel.strategy=zero1", "parallel.microbatches=3"]),
    "pipeline of 2 stages": (2, ["parallel.pipeline=2", "parallel.schedule=1f1b", "parallel.microbatches=5"]),
    "parameter server and 2 workers": (3, ["parallel.strategy=parameter_server"]),
}
RANK_VARIABLES = (b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK=")

pytestmark = [pytest.mark.usefixtures("mpi"), pytest.mark.full]


@pytest.fixture
def data_table(tmp_path, rng):
    path = tmp_path / "table.h5"
    with h5py.File(path, "w") as file:
        file["x"] = rng.standard_normal((ROWS, FEATURES))
        file["y"] = rng.integers(0, CLASSES, ROWS)
        file["y"][0] = CLASSES - 1  # so many classes there are
    return path


def line(ranks, data, out, *keys, options=()):
    settings = [word for key in (*TABLE, f"data.path={data}", *keys) for word in ("--set", key)]
    run = [sys.executable, "-m", "hpcdist", "run", "-n", str(ranks), *options]
    return [*run, "train", "--json", "--out", str(out), "--resume", "auto", *settings]


def run_expecting(command, code=0, environment=os.environ):
    """Run ``command``, check that its exit code is ``code``, and return its output."""
    done = jobs.run(command, env=environment)
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    assert "Traceback" not in output
    return output


def tensors(out, step):
    """Return the parameters of the checkpoint of ``step``."""
    file = out / f"step-{step}.safetensors"
    run_expecting(
        [sys.executable, "-m", "hpcdist", "checkpoint", "export", str(out / f"checkpoints/step-{step}"), str(file)]
    )
    return load_file(file)


@contextlib.contextmanager
def job(command, log, **environment):
    """Start ``command`` and kill all its remaining processes at the end.

    Each of them has the name of the run directory.
    """
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=os.environ | environment,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        for pid in processes(log.with_suffix("")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(timeout=LIMIT_S)


def processes(out, *, ranks=False):
    """Return the ids of the living processes of the job in ``out``, or of its ranks alone, in order."""
    pids = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            if entry.name.isdigit() and str(out).encode() in (entry / "cmdline").read_bytes():
                variables = (entry / "environ").read_bytes()
                if not ranks or any(name in variables for name in RANK_VARIABLES):
                    pids.append(int(entry.name))
    return sorted(pids)


# -- what is computed


def reference_step(weights, biases, x, y):
    """Take one step of gradient descent in place; return the mean cross entropy before it."""
    inputs = [x]
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        outputs = inputs[-1] @ weight.T + bias
        inputs.append(np.maximum(outputs, 0) if layer < len(weights) - 1 else outputs)
    shifted = inputs[-1] - inputs[-1].max(axis=1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    loss = -float(np.mean(logs[np.arange(len(y)), y]))
    gradient = (np.exp(logs) - np.eye(logs.shape[1])[y]) / len(y)
    for layer in reversed(range(len(weights))):
        into = gradient @ weights[layer] * (inputs[layer] > 0)
        weights[layer] -= RATE * (gradient.T @ inputs[layer])
        biases[layer] -= RATE * gradient.sum(axis=0)
        gradient = into
    return loss


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.matrix_except("zero1 in micro-batches on 2 ranks")
def test_layouts_match_an_independent_float64_reference(layout, data_table, tmp_path):
    ranks, keys = LAYOUTS[layout]
    summary = json.loads(
        run_expecting(line(ranks, data_table, tmp_path / "run", *keys, "run.steps=4")).partition("\n")[0]
    )
    before, after = tensors(tmp_path / "run", 1), tensors(tmp_path / "run", 4)
    weights = [before[f"{layer}.linear.weight"].copy() for layer in range(3)]
    biases = [before[f"{layer}.linear.bias"].copy() for layer in range(3)]
    with h5py.File(data_table) as file:
        losses = [reference_step(weights, biases, file["x"][:], file["y"][:]) for _ in range(3)]
    assert summary["train_loss"] == pytest.approx(losses[-1], rel=1e-12)
    norm = math.sqrt(sum(float(np.sum(tensor**2)) for tensor in after.values()))
    for layer in range(3):
        for name, expected in ("weight", weights[layer]), ("bias", biases[layer]):
            assert np.linalg.norm(after[f"{layer}.linear.{name}"] - expected) < 1e-12 * norm, (layer, name)


# -- kills, deaths, hangs, signals


@pytest.mark.matrix
def test_killed_job_resumes_with_the_same_bits(data_table, tmp_path, rng):
    keys = ["parallel.strategy=zero2", "optimizer.momentum=0.9"]
    run_expecting(line(2, data_table, tmp_path / "calm", *keys, "run.steps=12"))
    log, out = tmp_path / "killed-run.log", tmp_path / "killed-run"
    with job(line(2, data_table, out, *keys, "run.steps=1000000"), log) as process:
        until(lambda: newest_step(out) >= 2, process=process, log=log)
        doomed = processes(out) if rng.random() < 0.5 else processes(out, ranks=True)[:1]
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert process.wait(timeout=LIMIT_S) != 0
        until(lambda: not processes(out), process=process, log=log) if process.poll() is None else None
    reached = newest_step(out)
    steps = max(12, reached + 2)
    if steps > 12:  # it was quicker than this test
        run_expecting(line(2, data_table, tmp_path / "calm", *keys, f"run.steps={steps}"))
    run_expecting(line(2, data_table, out, *keys, f"run.steps={steps}"))
    calm, killed = tensors(tmp_path / "calm", steps), tensors(out, steps)
    assert calm.keys() == killed.keys()
    for name, tensor in calm.items():
        np.testing.assert_array_equal(killed[name], tensor, err_msg=f"{name}, killed at step {reached}")


def test_surviving_ranks_continue_when_a_rank_dies(mpi, data_table, tmp_path):
    if mpi.vendor != mpirun.OPEN_MPI or not mpi.version.startswith("5"):
        pytest.skip(f"{mpi.vendor} {mpi.version} ends the job when a rank dies")
    keys = ["parallel.strategy=zero1", "run.steps=6", "chaos.kill=['1@3:backward']"]
    output = run_expecting(line(3, data_table, tmp_path / "run", *keys, options=("--survive", "shrink")))
    summary = json.loads(output.partition("\n")[0])
    assert [life["died"] for life in summary["lives"]] == [1] and summary["steps"] == 6


def test_stopped_rank_ends_the_job_and_is_named(data_table, tmp_path):
    log, out = tmp_path / "stopped-run.log", tmp_path / "stopped-run"
    keys = ["run.steps=1000000", "communication.deadline_s=3", "checkpoint.every_steps=100"]
    with job(line(2, data_table, out, *keys), log) as process:
        until(lambda: newest_step(out) >= 100, process=process, log=log)
        os.kill(processes(out, ranks=True)[-1], signal.SIGSTOP)
        assert process.wait(timeout=LIMIT_S) not in (0, 75)
    verdict = jobs.hpcdist("hang", str(out)).stdout
    assert "rank 1" in verdict, verdict + log.read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGUSR1, 75)])
def test_signal_during_kernel_compilation_ends_the_job(number, code, data_table, tmp_path, rng):
    log, out = tmp_path / "signalled-run.log", tmp_path / "signalled-run"
    with job(line(2, data_table, out, "run.steps=1000000"), log, NUMBA_CACHE_DIR=str(tmp_path / "cold")) as process:
        until(lambda: bool(processes(out, ranks=True)), process=process, log=log)
        time.sleep(float(rng.random()) * 4)
        process.send_signal(number)
        assert process.wait(timeout=LIMIT_S) == code, log.read_text()
        assert not processes(out), log.read_text()


# -- files and environments


def test_damaged_checkpoint_is_detected(data_table, tmp_path, rng):
    out = tmp_path / "run"
    run_expecting(line(2, data_table, out, "parallel.strategy=zero1", "run.steps=2"))
    checkpoint = out / "checkpoints/step-2"
    assert not verify(checkpoint).damage
    for path in sorted(checkpoint.iterdir()):
        whole = path.read_bytes()
        for place in rng.integers(0, len(whole), 12):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << rng.integers(8)
            path.write_bytes(damaged)
            assert verify(checkpoint).damage, f"{path.name}: byte {place} of {len(whole)} has another bit"
        path.write_bytes(whole)
    assert not verify(checkpoint).damage


def test_linked_data_is_accepted_and_changed_data_is_rejected(data_table, tmp_path, rng):
    linking, out = tmp_path / "linking.h5", tmp_path / "run"
    with h5py.File(linking, "w") as file:
        file["other"] = rng.standard_normal(4096)
        file["x"] = h5py.ExternalLink(data_table.name, "x")
        file["y"] = h5py.ExternalLink(data_table.name, "y")
    linked = json.loads(run_expecting(line(1, linking, out, "run.steps=2")).partition("\n")[0])
    plain = json.loads(run_expecting(line(1, data_table, tmp_path / "plain", "run.steps=2")).partition("\n")[0])
    assert linked["train_loss"] == plain["train_loss"]
    with h5py.File(data_table, "r+") as file:
        file["x"][ROWS // 2, 3] += 1.0
    assert "was written by a run on other data" in run_expecting(line(1, linking, out, "run.steps=4"), 78)


def test_text_truncated_during_training_ends_the_job(tmp_path, rng):
    text, log, out = tmp_path / "text.txt", tmp_path / "cut-run.log", tmp_path / "cut-run"
    text.write_bytes(rng.integers(32, 127, 1 << 20, np.uint8).tobytes())
    keys = ["model.kind=gpt", "model.layers=1", "model.heads=1", "model.activation=gelu", "data.context=16"]
    with job(line(2, text, out, *keys, "run.steps=1000000", "checkpoint.keep=2"), log) as process:
        until(lambda: newest_step(out) >= 2, process=process, log=log)
        os.truncate(text, 1000)
        assert process.wait(timeout=LIMIT_S) == 74, log.read_text()
    assert f"{text} has 1,000 bytes" in log.read_text()


def test_links_in_the_run_directory_are_not_followed(data_table, tmp_path):
    out, precious = tmp_path / "run", tmp_path / "precious"
    run_expecting(line(1, data_table, out, "run.steps=2"))
    precious.write_text("precious")
    for name in ("checkpoints/latest.tmp", "usage.tmp", "usage.json.tmp"):
        (out / name).symlink_to(precious)
    elsewhere = tmp_path / "elsewhere"
    (out / "recorder").rename(elsewhere)
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    (out / "recorder").symlink_to(elsewhere)
    run_expecting(line(1, data_table, out, "run.steps=4"))
    assert precious.read_text() == "precious"
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before


def test_job_runs_with_closed_output_and_empty_environment(data_table, tmp_path):
    bare = {name: os.environ[name] for name in ("PATH", "HPCDIST_TUNING")}
    shell = ["env", "-i", *(f"{name}={value}" for name, value in bare.items()), "bash", "-c"]
    command = line(2, data_table, tmp_path / "run", "run.steps=2")
    done = subprocess.run([*shell, '"$@" >/dev/full 2>/dev/full', "bash", *command], timeout=LIMIT_S, check=False)
    assert done.returncode == 0 and newest_step(tmp_path / "run") == 2


def test_site_profile_and_run_name_cannot_execute_code(tmp_path):
    profile, sign, out = (
        tmp_path / "site.toml",
        tmp_path / "sign",
        tmp_path / "$(touch sign) `touch sign` '; touch sign; '",
    )
    submit = [sys.executable, "-m", "hpcdist", "submit", "--dry-run", "--site", str(profile), "--nodes", "1"]

    def submitted(block):
        profile.write_text(f'based_on = "slurm-openmpi"\n[blocks]\nmodules = """\n{block}\n"""\n')
        return jobs.run([*submit, "--out", str(out)], cwd=tmp_path)

    done = submitted(f"{{{{ cycler.__init__.__globals__.os.system('touch {sign}') }}}}")
    assert done.returncode == 78 and "cannot be rendered" in done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and not sign.exists()
    done = submitted("echo loaded")
    assert done.returncode == 0 and "\necho loaded\n" in done.stdout, done.stdout + done.stderr
    # No command of the script is found, but `touch`, which only an expansion of the name would call.
    words = f"command_not_found_handle() {{ :; }}; touch() {{ : >{sign}; }}; PATH=/nowhere\n"
    for text, executed in ((done.stdout, False), (f"echo {out}\n", True)):
        subprocess.run(
            ["/bin/bash", "-c", words + text], cwd=tmp_path, capture_output=True, timeout=LIMIT_S, check=False
        )
        assert sign.exists() == executed, text
