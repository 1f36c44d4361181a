"""The moving average of the parameters equals PyTorch's AveragedModel, under every layout and after a resume."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.optim import swa_utils

from harness.jobs import call_command
from harness.trainings import LAYOUTS, SETTINGS, assert_rejected, recipe_keys, run_steps, state, trainer_of
from hpcdist.adapters.torch.model import wrap
from hpcdist.checkpoint import listing
from hpcdist.checkpoint.convert import exporting
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import UsageError
from hpcdist.training.pytorch import load
from hpcdist.training.run.saving import CheckpointSaver
from hpcdist.training.script import Training

DECAY, HALF, STEPS = 0.9, 2, 4
CASES = {
    **{name: LAYOUTS[name][1] for name in ("allreduce", "zero1", "zero2", "zero3", "zero2, lamb", "1f1b x zero1")},
    "server": LAYOUTS["a server"][1],
    "offloaded lamb": recipe_keys("strategy=zero3 offload_optimizer=file optimizer.name=lamb"),
    "sgd without momentum": recipe_keys("strategy=zero1 optimizer.name=sgd optimizer.momentum=0.0"),
    "onebit": recipe_keys("communication.compression=onebit compression.warmup_steps=2 precision.mode=float32"),
    "bfloat16": recipe_keys("strategy=zero2 precision.mode=bfloat16"),
}
RESUMED = {"zero3": 3, "zero1": 1, "1f1b x zero1": 2}  # ranks after the resume, if they differ from before


def averaged_by_pytorch(history):
    """Return {tensor: moving average of the parameters in ``history``, the states after each step}."""
    rows = [
        {key[1]: torch.from_numpy(v.copy()) for key, v in sorted(s.items()) if key[0] == "parameters"} for s in history
    ]
    average = swa_utils.AveragedModel(
        nn.ParameterList(rows[0].values()), multi_avg_fn=swa_utils.get_ema_multi_avg_fn(DECAY)
    )
    for row in rows:
        average.update_parameters(nn.ParameterList(row.values()))
    return {name: value.detach().numpy() for name, value in zip(rows[0], average.module, strict=True)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.full_except("zero3", "1f1b x zero1", "offloaded lamb")
def test_average_equals_pytorch_after_a_resume(name, text, tmp_path):
    keys = {**SETTINGS, "data.path": text, "precision.mode": "float64", "run.global_batch": 12, **CASES[name]}
    if "zero.offload_optimizer" in keys:
        keys["zero.offload_directory"] = tmp_path
    keys["optimizer.ema_decay"], bound = DECAY, 1e-12 if keys["precision.mode"] == "float64" else 2e-7
    ranks = 4 if "1f1b" in name else 2

    def train(comm, first, last, resume=None):
        trainer, states = trainer_of(comm, keys, resume), []
        for step in range(first, last):
            run_steps(trainer, step + 1, step)
            states.append(state(trainer))
        return states, CheckpointSaver(trainer, tmp_path / "checkpoints").save(last)

    (before, saved), *_ = run_threads(ranks, lambda comm: train(comm, 0, HALF))
    (after, saved), *_ = run_threads(RESUMED.get(name, ranks), lambda comm: train(comm, HALF, STEPS, saved))
    for tensor, expected in averaged_by_pytorch(before + after).items():
        average = after[-1]["optimizer.ema", tensor]
        np.testing.assert_allclose(average, expected, rtol=1e-12, atol=bound, err_msg=tensor)
        assert not np.array_equal(average, after[-1]["parameters", tensor])


def test_averaged_parameters_are_read_and_exported(tmp_path, capsys):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    x, y = torch.randn(8, 5).double(), torch.randn(8, 1).double()
    keys = {"run.steps": 5, "run.global_batch": 8, "optimizer.ema_decay": DECAY, "precision.mode": "float64"}
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(DECAY))
    with Training(wrap(model, nn.functional.mse_loss), keys, out=tmp_path / "run") as training:
        for _ in training.steps:
            training.step(x, y)
            average.update_parameters(model)
    averaged, last = training.parameters(averaged=True), training.parameters()
    assert not np.array_equal(averaged["0.0.weight"], last["0.0.weight"])
    for (name, expected), key in zip(average.module.named_parameters(), averaged, strict=True):
        np.testing.assert_allclose(averaged[key], expected.detach(), rtol=1e-12, atol=1e-14, err_msg=name)
    checkpoint = listing.select(tmp_path / "run")
    tensors = exporting.tensors_to_export(listing.load_usable(checkpoint), False, True)
    with open(tmp_path / "out", "w+b") as file:
        exporting.write_tensors(checkpoint, file.fileno(), [(tensors[0], 0)])
        exported = np.fromfile(tmp_path / "out").reshape(tensors[0].shape)
    assert exporting.key_of(tensors[0]) == tensors[0].name
    np.testing.assert_array_equal(exported, averaged[tensors[0].name])
    for values, *flags in ((last,), (averaged, "--averaged")):
        out = tmp_path / f"model{len(flags)}.pt"
        assert call_command(capsys, "checkpoint", "export", checkpoint, out, *flags)[0] == 0
        load(whole := copy.deepcopy(model), values)  # the statistics of BatchNorm are in the model
        torch.testing.assert_close(dict(whole.state_dict()), torch.load(out), rtol=0, atol=0)


def test_average_without_the_key_is_rejected(tmp_path):
    model = wrap(nn.Linear(5, 1), nn.functional.mse_loss)
    with Training(model, {"run.steps": 1, "run.global_batch": 4}, out=tmp_path / "run") as training:
        training.step(torch.ones(4, 5), torch.ones(4, 1))
    with pytest.raises(UsageError, match=r"set optimizer\.ema_decay"):
        training.parameters(averaged=True)
    loaded = listing.load_usable(listing.select(tmp_path / "run"))
    with pytest.raises(UsageError, match="no moving average"):
        exporting.tensors_to_export(loaded, False, True)
    with pytest.raises(UsageError, match="leave out --averaged"):
        exporting.tensors_to_export(loaded, True, True)


@pytest.mark.parametrize("layout", ["strategy=local_sgd", "strategy=parameter_server consistency=asp"])
def test_strategies_with_own_steps_are_rejected(layout):
    assert_rejected(recipe_keys(f"optimizer.ema_decay=0.9 {layout}"), "optimizer.ema_decay = 0.9")
