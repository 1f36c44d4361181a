"""Trainings of a script: the same steps as a recipe, and clear errors for wrong scripts."""

import os
import re
import signal
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from harness import jobs
from harness.marks import cases
from harness.models.passes import Passes
from hpcdist import models
from hpcdist.arrays import backend
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.arena import Arena
from hpcdist.models.config import ModelConfig
from hpcdist.models.model import Model
from hpcdist.strategies.core.grid import ProcessGrid
from hpcdist.telemetry import report
from hpcdist.telemetry.page import document
from hpcdist.training import inference, script
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.script import Training

CONFIG = ModelConfig(kind="mlp", layers=2, hidden=16)
KEYS = {"run.steps": 6, "run.global_batch": 12, "optimizer.warmup_steps": 2, "run.sentinel_every_steps": 1}


def _model(dtype="float32", **more):
    return Model(models.build(CONFIG, dtype, features=5, classes=3).stages, dtype, tokens_per_sample=1, **more)


def _batches(rng, steps=6):
    return [(rng.standard_normal((12, 5)).astype(np.float32), rng.integers(0, 3, 12)) for _ in range(steps)]


def _expected(batches):
    """Return the losses of plain AdamW in float64, with the norm clipped to 1 and a cosine rate."""
    run, losses = Passes(models.build(CONFIG, "float64", features=5, classes=3), 1234), []
    store, decayed = run.store, np.zeros(run.store.size)
    for segment in run.model.layout.segments:
        decayed[segment.range.slice] = 0.1 * segment.spec.adapted
    m, v = np.zeros(store.size), np.zeros(store.size)
    for step, (x, y) in enumerate(batches, start=1):
        losses.append(run.step([(x.astype(np.float64), y)], 1 / len(x)) / len(x))
        g = run.gradient.array * min(1.0, 1.0 / np.linalg.norm(run.gradient.array))
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        update = (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8) + decayed * store.array
        rate = step / 2 if step <= 2 else 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * (step - 2) / 4))
        store.array[...] -= 3e-3 * rate * update
    return losses


@pytest.mark.parametrize("strategy", ["allreduce", "zero1", "zero3"])
def test_script_steps_match_the_formulas(strategy, tmp_path, rng):
    batches = _batches(rng)
    with Training(_model(), KEYS | {"parallel.strategy": strategy, "run.seed": 1234}, out=tmp_path / "run") as training:
        losses = [training.step(*(part[training.share] for part in batches[step])) for step in training.steps]
    np.testing.assert_allclose(losses, _expected(batches), rtol=1e-5)
    kept = training.parameters()
    assert {key: value.shape for key, value in kept.items()} == {
        segment.key: segment.spec.shape for segment in _model().layout.segments
    }
    assert all(np.isfinite(value).all() for value in kept.values())
    assert recipes.load_stored(training.path / "recipe.toml").model.kind == "given"
    assert (training.path / "metrics.h5").exists() and training.done == 6
    with pytest.raises(UsageError, match=r"is defined in the script .* model\.factory"):
        inference.load(solo(), training.path, recipes.load_stored(training.path / "recipe.toml"))
    with pytest.raises(UsageError, match="is defined in the script that trained it; generate text in that script"):
        list(inference.sample(training.path, ["a"], 1, temperature=1.0, top_k=0, seed=0))


def test_script_run_resumes(tmp_path, rng):
    batches, keys = _batches(rng), KEYS | {"optimizer.groups": ["0.* *.bias: weight_decay=0.5 rate_factor=0.25"]}

    with Training(_model(), keys, out=tmp_path / "whole") as training:
        whole = [training.step(*batches[step]) for step in training.steps]
    with Training(_model(), keys, out=tmp_path / "halved") as training:
        first = [training.step(*batches[step]) for step in range(3)]
    with Training(_model(), keys, out=tmp_path / "halved", resume="auto") as training:
        second = [training.step(*batches[step]) for step in training.steps]
    assert first + second == whole
    assert recipes.load_stored(training.path / "recipe.toml").optimizer.groups == tuple(keys["optimizer.groups"])


def test_initial_values_of_the_model_are_used(tmp_path, rng):
    given = _model(seeded=False)
    stage = given.stages[0]
    stage.initialise = lambda parameters, rng_of: [view.fill(0.5) for view in parameters.values()]
    with Training(given, KEYS | {"optimizer.learning_rate": 1e-9}, out=tmp_path / "run") as training:
        for _ in training.steps:
            training.step(*_batches(rng, 1)[0])
    kept = training.parameters()
    assert all((abs(value - 0.5) < 1e-6).all() for key, value in kept.items() if key.startswith("0."))


def test_wrong_script_calls_are_rejected(tmp_path, rng):
    x, y = _batches(rng, 1)[0]
    training = Training(_model(), KEYS | {"run.steps": 2}, out=tmp_path / "run")
    with pytest.raises(UsageError, match="got 11 inputs and 12 targets, expected 12; .* of the 12 samples of the step"):
        training.step(x[:11], y)
    with pytest.raises(UsageError, match="a object is not an array of numbers"):
        training.step(object(), y)
    with pytest.raises(UsageError, match="step 0 was not made"):
        for _ in training.steps:
            pass
    training.step(x, y)
    training.step(x, y)
    with pytest.raises(UsageError, match=r"all run.steps = 2 steps are done.* loop over `training.steps`"):
        training.step(x, y)
    assert (training.path / "checkpoints" / "step-2").exists()
    training.close()
    training.close()  # once more does nothing
    with pytest.raises(UsageError, match="steps are done"):
        training.step(x, y)
    with pytest.raises(UsageError, match="holds this run already"):
        Training(_model(), KEYS | {"run.steps": 2}, out=tmp_path / "run")


@cases(
    "more, keys, output",
    ({"dtype": "float64"}, {}, "the model computes in float64, but precision.mode = 'float32'"),
    ({"on": "gpu"}, {}, "the model is on device 'gpu', but run.device = 'cpu'"),
    ({}, {"run.stepz": 3}, "run.stepz"),
    ({}, {"data.path": "/nowhere"}, "data.path = '/nowhere' has no effect, because the script provides the batches"),
    ({}, {"data.context": 64}, "data.context = 64 has no effect"),
    ({}, {"run.validation_samples": 5}, "run.validation_samples = 5 has no effect"),
    ({}, {"checkpoint.keep_best": 2}, "there is no validation loss"),
    ({}, {"model.hidden": 64}, r"model.hidden = 64 has no effect with model.kind = 'given'.*"),
    ({}, {"parallel": {"tensor": 2}}, "tensor"),
    ({}, {"parallel.strategy": "parameter_server", "parameter_server.consistency": "asp"}, "consistency = 'bsp'"),
)
def test_incompatible_recipes_are_rejected(more, keys, output, tmp_path):
    with pytest.raises(ConfigurationError, match=output):
        Training(_model(**more), KEYS | keys, out=tmp_path / "run")


def test_stop_request_in_the_last_step_is_fulfilled(tmp_path, rng):
    with Training(_model(), KEYS | {"run.steps": 2}, out=tmp_path / "run") as training:
        for step in training.steps:
            if step == 1:
                (training.path / "stop").touch()
            assert np.isfinite(training.step(*_batches(rng, 1)[0]))
    assert training.done == 2 and not (training.path / "stop").exists()
    training = Training(_model(), KEYS, out=tmp_path / "other")
    (training.path / "stop").touch()
    with pytest.raises(SystemExit) as left:
        training.step(*_batches(rng, 1)[0])
    assert left.value.code == 75
    with Training(_model(), KEYS, out=tmp_path / "other", resume="auto") as training:
        assert training.done == 1


def test_resume_without_a_run_directory_is_rejected():
    with pytest.raises(UsageError, match="resume = 'auto' needs out"):
        Training(_model(), KEYS, resume="auto")


def test_evaluation_uses_the_current_parameters(tmp_path, rng):
    batches, (x, y) = _batches(rng), _batches(rng, 1)[0]
    model = _model()
    with Training(model, KEYS | {"parallel.strategy": "zero3"}, out=tmp_path / "run") as training:
        for step in training.steps:
            training.step(*batches[step])
        result = training.evaluate(x, y)
        assert np.isnan(training.evaluate(x[:0], y[:0]))
    store = FlatStore(model.layout, model.dtype)
    for key, value in training.parameters().items():
        store.view(key)[...] = value
    expected = model.evaluate(model.bind(store), x, y, Arena()) / len(x)
    assert result == pytest.approx(expected, rel=1e-6)


def test_script_that_does_not_end_its_run_gets_a_warning(tmp_path, rng, capsys):
    training = Training(_model(), KEYS, out=tmp_path / "run")
    training.step(*_batches(rng, 1)[0])
    training._forgotten()
    assert f"1 steps were made in {tmp_path}/run, but the last steps are not saved" in capsys.readouterr().err
    training.close()
    training._forgotten()
    assert "not saved" not in capsys.readouterr().err


def test_signal_handlers_are_restored_for_the_script(tmp_path, rng):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with Training(_model(), KEYS | {"run.steps": 1}, out=tmp_path / "run") as training:
            training.step(*_batches(rng, 1)[0])
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_failing_script_leaves_no_threads(tmp_path, rng):
    def raise_in_training():
        with Training(_model(), KEYS, out=tmp_path / "run") as training:
            training.step(*_batches(rng, 1)[0])
            raise KeyError("of the script")

    with pytest.raises(KeyError):
        raise_in_training()
    threads = {thread.name for thread in threading.enumerate()}
    with Training(_model(), KEYS, out=tmp_path / "run", resume="auto") as training:
        losses = [training.step(*_batches(rng, 1)[0]) for _ in training.steps]
    assert len(losses) == 6 and {thread.name for thread in threading.enumerate()} <= threads


@pytest.mark.full
def test_sampler_visits_every_sample_once_per_epoch(tmp_path, rng):
    """Steps take 12 of 30 samples, so an epoch ends within the third step.

    The same seed gives the same order, also after a resume.
    """

    def drawn(out, steps, **more):
        with Training(_model(), KEYS, out=tmp_path / out, **more) as training:
            assert (training.data_rank, training.data_size) == (0, 1)
            sampler = training.sampler(range(30))
            assert len(sampler) == 6 - training.done
            results = []
            for indices, _ in zip(sampler, range(steps), strict=False):
                results.append(indices)
                training.step(*_batches(rng, 1)[0])
        return results

    whole = drawn("whole", 6)
    flat = [index for indices in whole for index in indices]
    assert [len(indices) for indices in whole] == [12] * 6
    assert sorted(flat[:30]) == sorted(flat[30:60]) == list(range(30)) != flat[:30] != flat[30:60]
    assert drawn("halved", 2) + drawn("halved", 4, resume="auto") == whole
    training = Training(_model(), KEYS | {"run.steps": 1}, out=tmp_path / "in order")
    assert list(training.sampler(range(9), shuffle=False)) == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2]]
    with pytest.raises(UsageError, match="has no samples"):
        training.sampler([])
    x, y = _batches(rng, 1)[0]
    with pytest.raises(
        UsageError, match=r"got 2 arrays as input, but \w+ takes one array; only models of hpcdist.adapters.torch.model"
    ):
        training.step((x, x), y)
    with pytest.raises(UsageError, match=r"mask of the batch \(a dict\) is a single number; expected an array"):
        backend.as_array({"x": np.ones(3), "mask": np.array(1.0)})
    with pytest.raises(UsageError, match="different numbers of samples .0: 12, 1: 3."):
        training.step((x, x[:3]), y)
    with pytest.raises(UsageError, match="a dict of tuples or dicts"):
        training.step({"a": (x,)}, y)
    training.step(x, y)
    training.close()


def test_launcher_sets_directory_and_resume_of_the_first_training(tmp_path, monkeypatch, rng):
    batches = _batches(rng)
    for steps in (2, 4):
        monkeypatch.setenv("HPCDIST_RUN_DIR", str(tmp_path / "said"))
        monkeypatch.setenv("HPCDIST_RESUME", "auto")
        with Training(_model(), KEYS | {"run.steps": steps}, out=tmp_path / "own") as training:
            assert (training.path, training.done) == (tmp_path / "said", steps - 2)
            for step in training.steps:
                training.step(*(array[training.share] for array in batches[step]))
    training = Training(_model(), KEYS, out=tmp_path / "own")
    assert training.path == tmp_path / "own", "another Training of the script has its own"
    training.close()


def test_report_shows_the_data_time_of_a_script(tmp_path, rng):
    batches = _batches(rng)
    with Training(_model(), KEYS | {"run.steps": 4}, out=tmp_path / "run") as training:
        for step in training.steps:
            time.sleep(0.2)
            training.step(*(array[training.share] for array in batches[step]))
    result = report.report(tmp_path / "run")
    shares = {name: result.figures[f"{name}_fraction"] for name in ("compute", "comm", "update", "data", "other")}
    assert shares["data"] > 0.5 and sum(shares.values()) == pytest.approx(1.0), shares
    assert f", data {shares['data']:.1%}, other " in report.text(result)


def test_environment_sets_the_resume_of_a_training(tmp_path, monkeypatch, rng):
    batches = _batches(rng)
    for steps in (2, 4):
        monkeypatch.setenv("HPCDIST_RESUME", "auto")
        with Training(_model(), KEYS | {"run.steps": steps}, out=tmp_path / "own") as training:
            assert training.done == steps - 2
            for step in training.steps:
                training.step(*(array[training.share] for array in batches[step]))
    monkeypatch.setenv("HPCDIST_RESUME", "auto")
    with pytest.raises(UsageError, match="Set HPCDIST_RUN_DIR to the run directory as well"):
        Training(_model(), KEYS)
    monkeypatch.setenv("HPCDIST_RESUME", "yes")
    with pytest.raises(UsageError, match="HPCDIST_RESUME = 'yes'; choose 'auto' or 'never'"):
        Training(_model(), KEYS, out=tmp_path / "own")


def test_invalid_recipe_ends_the_script_with_exit_code_78(tmp_path):
    program = "from hpcdist.training.script import Training\nTraining(None, {'run.stepps': 2})"
    done = jobs.run([sys.executable, "-c", program], env={**os.environ, "HPCDIST_FAILURE_DIR": str(tmp_path)})
    assert done.returncode == 78, done.stderr
    assert "the nearest known is 'run.steps'" in (tmp_path / "rank-0.txt").read_text()


@pytest.mark.parametrize(("every", "compared"), [(0, [0, 1, 2]), (4, [0, 1, 2, 4, 8])])
def test_first_batches_are_always_compared(every, compared, monkeypatch):
    steps = []
    monkeypatch.setattr(script, "check_batch", lambda comm, replica, x, y, what, looks: steps.append(what))
    trainer = SimpleNamespace(
        grid=ProcessGrid(pipeline=2),
        context=SimpleNamespace(computes=True, units=[0]),
        last_stage=True,
        comm=None,
    )
    run = SimpleNamespace(sentinel_every_steps=every)
    training = SimpleNamespace(_trainer=trainer, recipe=SimpleNamespace(run=run), data_rank=0)
    for number in range(10):
        Training._compare(training, number, None, None, number, number)
    assert steps == compared


def test_logged_values_are_reported(tmp_path, rng):
    batches = _batches(rng)
    with Training(_model(), KEYS, out=tmp_path / "run") as training:
        for step in training.steps:
            training.step(*batches[step])
            training.log(accuracy=step / 10, **({"perplexity": np.array([2.5])} if step == 3 else {}))
        with pytest.raises(UsageError, match="log: accuracy is a str, not a number"):
            training.log(accuracy="high")
        with pytest.raises(UsageError, match="log: samples = -1, expected a number of at least 0"):
            training.log(accuracy=1, samples=-1)
    with pytest.raises(UsageError, match="log: the run has ended"):
        training.log(accuracy=1)
    data = report.report(training.path)
    for line in (r"accuracy +0\.5 ", r"perplexity +2\.5 .* at step 4"):
        assert re.search(line, report.text(data)), report.text(data)
    assert "perplexity" in document.make_page(data)
