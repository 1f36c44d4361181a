"""Whole jobs as a user starts them: train, inspect, interrupt, resume, and clear messages for rejected inputs."""

import json
import os
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest

from harness import jobs
from harness.jobs import LIMIT_S, figures
from harness.marks import cases
from hpcdist.hdf5 import files
from hpcdist.telemetry.metrics import step_metrics

ENDLESS = 10**6  # steps: no machine is done before it is told to stop
SMALL = ["--set", "model.layers=1", "--set", "model.hidden=32", "--set", "model.heads=2", "--set", "data.context=16"]


def hpcdist(*arguments, **environment):
    return jobs.run([sys.executable, "-m", "hpcdist", *map(str, arguments)], env=os.environ | environment)


def train(ranks, text, *arguments, steps=12):
    launcher = ["run", "-n", ranks] if ranks else []
    settings = ["--set", f"data.path={text}", "--set", f"run.steps={steps}", "--set", "run.global_batch=6"]
    return hpcdist(*launcher, "train", *SMALL, *settings, "--json", *arguments)


def summary(done):
    return figures(done)


def test_train_evaluate_sample_and_report(text, tmp_path):
    out = tmp_path / "run"
    result = summary(train(2, text, "--out", out, "--set", "communication.algorithm=ring", steps=30))
    for key in ("train_loss", "val_loss", "tokens_per_s", "step_s_median", "comm_fraction", "peak_bytes", "run_dir"):
        assert result[key] is not None
    assert (result["steps"], result["world"], result["strategy"]) == (30, 2, "allreduce")
    psi = result["peak_bytes"]["gradients"]
    assert psi * 0.99 <= result["bytes_sent_per_step"] <= psi * 1.01 + 200, "2 Psi (p - 1) / p with p = 2, and the norm"
    assert result["train_loss"] < np.log(256) and result["entropy"]["bigram"] > result["entropy"]["trigram"]
    evaluated = hpcdist("evaluate", out, "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout.splitlines()[-1])["val_loss"] == pytest.approx(result["val_loss"], rel=1e-5)
    texts = [hpcdist("sample", out, "--prompt", "ab", "--tokens", "30", "--seed", "1") for _ in range(2)]
    assert texts[0].returncode == 0, texts[0].stderr
    assert texts[0].stdout == texts[1].stdout and texts[0].stdout.startswith("ab") and len(texts[0].stdout) > 20
    plotted = hpcdist("report", out, "--plot", tmp_path / "loss.png")
    assert plotted.returncode == 0, plotted.stderr
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert hpcdist("hang", out).returncode == 0


@pytest.mark.full
def test_native_collectives_report_no_bytes(text, tmp_path):
    result = summary(train(2, text, "--out", tmp_path / "run", "--set", "communication.algorithm=native"))
    assert result["bytes_sent_per_step"] is None and "not visible" in result["bytes_sent_reason"]


@pytest.mark.full
def test_training_without_a_launcher_matches_three_ranks(text, tmp_path):
    alone = summary(train(0, text, "--out", tmp_path / "alone"))
    together = summary(train(3, text, "--out", tmp_path / "together"))
    assert (alone["world"], together["world"]) == (1, 3)
    assert together["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-5)
    assert together["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-5)


def _wait_for(condition, process):
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < limit, "nothing happened in time"
        time.sleep(0.02)


def _has_rows(path):
    try:
        with files.open_read(path) as metrics:
            return len(metrics["steps/loss"]) > 0
    except (OSError, KeyError):
        return False  # not made yet, or just being written


def _start(text, out, *arguments, every=10, steps=2000, ranks=2):
    command = [sys.executable, "-m", "hpcdist", "run", "-n", str(ranks), "train", *SMALL, "--out", str(out), "--json"]
    for setting in (f"data.path={text}", f"run.steps={steps}", "run.global_batch=6", f"checkpoint.every_steps={every}"):
        command += ["--set", setting]
    return subprocess.Popen(
        [*command, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.full
def test_run_resumes_in_another_layout_with_more_steps(text, tmp_path):
    out, double = tmp_path / "run", ["--set", "precision.mode=float64", "--set", "optimizer.decay=constant"]
    first = train(2, text, "--out", out, *double, "-v", steps=6)
    details = "step proven free of deadlock: ", "communication.algorithm = auto: "
    assert all(line in first.stderr for line in details)
    layout = ["--set", "parallel.strategy=zero3", "--set", "communication.algorithm=ring"]
    done = train(3, text, "--out", out, "--resume", "auto", *layout, *double, steps=12)
    assert "other than in the start before: " in done.stderr and "parallel.strategy = 'allreduce' there" in done.stderr
    assert not any(line in done.stderr for line in details), "without -v"
    whole = summary(train(1, text, "--out", tmp_path / "whole", *double, steps=12))
    assert summary(done)["steps"] == 12
    assert summary(done)["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-12)


@pytest.mark.full
def test_mixture_resumes_on_another_number_of_ranks_with_the_next_samples(text, tmp_path, rng):
    np.save(tmp_path / "tokens.npy", rng.integers(0, 256, 3000).astype(np.uint16))
    (tmp_path / "recipe.toml").write_text(
        f"[[data.source]]\npath = '{text}'\nweight = 3\n[[data.source]]\npath = '{tmp_path}/tokens.npy'\n"
    )

    def mixed(ranks, out, *arguments):
        keys = "run.global_batch=6", "precision.mode=float64", "optimizer.decay=constant"
        settings = [word for key in keys for word in ("--set", key)]
        words = tmp_path / "recipe.toml", *SMALL, *settings, "--out", tmp_path / out, "--json"
        return summary(hpcdist("run", "-n", ranks, "train", *words, *arguments))

    mixed(2, "run", "--set", "run.steps=7")
    resumed = mixed(3, "run", "--resume", "auto", "--set", "run.steps=15")
    whole = mixed(1, "whole", "--set", "run.steps=15")
    assert resumed["steps"] == whole["steps"] == 15
    for figure in ("train_loss", "val_loss"):
        assert resumed[figure] == pytest.approx(whole[figure], rel=1e-12)


# name -> (ranks, keys)
LAYOUTS = {
    "allreduce, delayed": (2, ("communication.overlap=thread", "communication.delayed=true")),
    "zero1": (2, ("parallel.strategy=zero1", "checkpoint.asynchronous=true")),
    "zero2": (3, ("parallel.strategy=zero2", "parallel.microbatches=2")),
    "zero3": (2, ("parallel.strategy=zero3",)),
    "dedicated server": (3, ("parallel.strategy=parameter_server", "checkpoint.writers=2")),
    "colocated servers": (2, ("parallel.strategy=parameter_server", "parameter_server.placement=colocated")),
    "1f1b": (2, ("parallel.pipeline=2", "parallel.microbatches=3")),
    "gpipe x data with zero1": (
        4,
        ("parallel.pipeline=2", "parallel.schedule=gpipe", "parallel.microbatches=2", "parallel.strategy=zero1"),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.full_except("zero3")
@pytest.mark.matrix_except("zero3")
def test_killed_runs_resume_with_the_same_bits(text, tmp_path, layout, rng):
    ranks, keys = LAYOUTS[layout]
    steps, every = 240, 10
    settings = [argument for key in (*keys, f"checkpoint.every_steps={every}") for argument in ("--set", key)]
    whole = summary(train(ranks, text, "--out", tmp_path / "whole", *settings, steps=steps))
    process = _start(text, tmp_path / "killed", *settings, steps=steps, ranks=ranks)
    reached = every * int(rng.integers(2, 12))
    _wait_for(lambda: jobs.newest_step(tmp_path / "killed") >= reached, process)
    os.killpg(process.pid, signal.SIGKILL)  # the launcher dies at once; its ranks must not outlive it for long
    process.communicate(timeout=LIMIT_S)
    jobs.until(lambda: not jobs.is_running(tmp_path / "killed"), "end of the ranks after that of their launcher")
    resumed = summary(train(ranks, text, "--out", tmp_path / "killed", "--resume", "auto", *settings, steps=steps))
    assert resumed["val_loss"] == whole["val_loss"]
    # Of the file: a start that finds all steps made, since the kill came late, has no loss of its own.
    losses = [step_metrics.read(tmp_path / name / "metrics.h5").steps["loss"] for name in ("whole", "killed")]
    np.testing.assert_array_equal(*losses)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"])
@pytest.mark.full
@pytest.mark.matrix_except("SIGTERM")
def test_run_asked_to_stop_saves_and_resumes(text, tmp_path, number, code):
    out = tmp_path / "run"
    process = _start(text, out, every=0, steps=ENDLESS)
    _wait_for(lambda: _has_rows(out / "metrics.h5"), process)  # before the first step there is nothing to save
    process.send_signal(number)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code, errors
    steps = [int(path.name.removeprefix("step-")) for path in (out / "checkpoints").glob("step-*")]
    assert len(steps) == 1 and 0 < steps[0] < ENDLESS
    jobs.until(lambda: not jobs.is_running(out), "end of the ranks after that of their launcher")
    result = hpcdist("evaluate", out, "--json")
    assert result.returncode == 0 and json.loads(result.stdout.splitlines()[-1])["steps"] == steps[0], result.stderr


def test_stop_file_requests_a_requeue(text, tmp_path):
    out = tmp_path / "run"
    process = _start(text, out, every=0, steps=ENDLESS)
    _wait_for((out / "metrics.h5").exists, process)
    (out / "stop").touch()
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75
    last = errors.splitlines()[-1]
    assert last.startswith("hpcdist run: stopped at ")
    assert f" of {ENDLESS} steps, saved; go on with hpcdist run -n 2 train " in last
    assert last.endswith(" --resume auto") and f" --out {out} " in last
    assert not (out / "stop").exists(), "the wish is granted: the next start must not meet it"


@pytest.mark.full
def test_run_killed_before_its_first_checkpoint_starts_again(text, tmp_path):
    settings = ["--set", "run.steps=200", "--set", "checkpoint.every_steps=0"]
    process = _start(text, tmp_path / "run", "--set", "chaos.step_s=0.1", steps=200, every=0)
    _wait_for((tmp_path / "run" / "metrics.h5").exists, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)
    jobs.until(lambda: not jobs.is_running(tmp_path / "run"), "end of the ranks after that of their launcher")
    result = summary(train(2, text, "--out", tmp_path / "run", "--resume", "auto", *settings))
    assert result["steps"] == 200


def test_failed_start_does_not_occupy_the_directory(text, tmp_path):
    assert train(0, text, "--out", tmp_path / "run", "--set", "data.path=/does/not/exist").returncode == 78
    assert summary(train(0, text, "--out", tmp_path / "run", steps=2))["steps"] == 2


@pytest.mark.full
def test_resume_on_changed_data_is_rejected(text, tmp_path):
    out = tmp_path / "run"
    summary(train(0, text, "--out", out, steps=2))
    text.write_text(text.read_text()[: -len("abcd abcd")] + "abcdefghi")
    done = train(0, text, "--out", out, "--resume", "auto", steps=2)
    assert done.returncode == 78 and "other data" in done.stderr


def test_directory_belongs_to_one_run(text, tmp_path):
    out = tmp_path / "run"
    summary(train(0, text, "--out", out, steps=2))
    again = train(0, text, "--out", out, steps=2)
    assert again.returncode == 2 and "--resume auto" in again.stderr
    other = train(0, text, "--out", out, "--resume", "auto", "--set", "run.seed=5", steps=2)
    assert other.returncode == 78 and "holds another run: run.seed = 0 there, 5 now" in other.stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    foreign = train(0, text, "--out", tmp_path / "full", steps=2)
    assert foreign.returncode == 78 and (tmp_path / "full" / "thesis.txt").read_text() == "mine"


@cases(
    "arguments, code, words",
    (["--set", "model.layer=3"], 78, ["model.layer", "model.layers"]),
    (["--set", "run.steps=many"], 78, ["run.steps", "many"]),
    (["--set", "decentralised.graph=torus"], 78, ["decentralised.graph", "gossip"]),
    (["--set", "precision.loss_scale=8"], 78, ["precision.loss_scale", "float16"]),
    (["--set", "parallel.data=9"], 78, ["run.global_batch = 6"]),
    (["--set", "data.path=/does/not/exist"], 78, ["/does/not/exist"]),
    (["--set", "run.device=gpu"], 69, ["cupy"]),
    (["missing.toml"], 74, ["missing.toml"]),
)
def test_bad_input_is_rejected_with_message_and_exit_code(text, tmp_path, arguments, code, words):
    done = train(0, text, "--out", tmp_path / "run", *arguments)
    assert done.returncode == code, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr


def test_more_ranks_than_samples_are_rejected(text, tmp_path):
    done = train(3, text, "--out", tmp_path / "run", "--set", "run.global_batch=2")
    assert done.returncode == 78 and "with 3 data ranks: each needs at least one sample" in done.stderr


@pytest.mark.full
def test_virtual_dataset_without_its_source_ends_all_ranks_with_78(tmp_path):
    """h5py: the dataset of the source file does not exist."""
    with h5py.File(tmp_path / "source.h5", "w") as file:
        file["part"] = np.zeros(6000, np.uint8)
    layout = h5py.VirtualLayout((6000,), np.uint8)
    layout[:] = h5py.VirtualSource("source.h5", "missing", (6000,))
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file.create_virtual_dataset("tokens", layout)
    done = train(2, tmp_path / "virtual.h5", "--out", tmp_path / "run", steps=1)
    assert done.returncode == 78, done.stderr
    assert "no dataset missing" in done.stderr and "Segmentation" not in done.stderr


@pytest.mark.full
def test_nan_loss_names_step_rank_and_tensor(text, tmp_path):
    settings = ["--set", "optimizer.learning_rate=1e30", "--set", "optimizer.warmup_steps=0"]
    done = train(2, text, "--out", tmp_path / "run", *settings)
    assert done.returncode == 1
    assert "step 2: loss" in done.stderr or "step 3: loss" in done.stderr, done.stderr
    assert ("rank 0: " in done.stderr and "layer" in done.stderr) or "parameter" in done.stderr


def test_new_run_begins_with_the_parameters_of_another_run(text, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    before = summary(train(0, text, "--out", old, steps=30))
    begun = ("--set", "parallel.strategy=zero3", "--init-from", old, "--out", new)
    done = train(0, text, *begun, steps=2)
    assert "start with the parameters of" in done.stderr and "step-30, after 30 steps" in done.stderr
    assert summary(done)["steps"] == 2 and summary(done)["val_loss"] < before["val_loss"] + 0.2, "not of drawn ones"
    wider = train(0, text, *begun, "--resume", "auto", "--set", "model.hidden=64")
    assert wider.returncode == 78 and "holds another run: model.hidden = 32 there" in wider.stderr
    missing = train(0, text, "--out", tmp_path / "none", "--init-from", tmp_path / "nowhere")
    assert missing.returncode == 74 and "has no checkpoints" in missing.stderr
