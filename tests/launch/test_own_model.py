"""The README's example: a plain script of PyTorch and its distributed twin print the same losses."""

import difflib
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import hpcdist
from hpcdist.training import recipe as recipes
from hpcdist.training.data import Order

torch = pytest.importorskip("torch")

README = Path(__file__).parents[2] / "README.md"
MOST_LINES = 10
LAYOUTS = {
    "allreduce": (2, {}),
    "zero3": (2, {"HPCDIST_SET__PARALLEL__STRATEGY": "zero3"}),
    "pipeline": (2, {"HPCDIST_SET__PARALLEL__PIPELINE": "2"}),
}


def examples() -> tuple[str, str]:
    """Return the plain script and its twin, as the README has them."""
    section = README.read_text().split("## Your own model\n")[1].split("\n## ")[0]
    plain, own = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return plain, own


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"^step \d+: loss ([\d.]+)$", text, re.MULTILINE)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of the plain script, and what it saves."""
    folder = tmp_path_factory.mktemp("plain")
    before = os.getcwd()
    printed: list[str] = []
    os.chdir(folder)
    try:
        exec(compile(examples()[0], "train_plain.py", "exec"), {"print": lambda *texts: printed.extend(texts)})
    finally:
        os.chdir(before)
    return losses("\n".join(printed)), torch.load(folder / "model.pt")


def test_few_lines_are_other_ones() -> None:
    lines = difflib.ndiff(*(text.splitlines() for text in examples()))
    assert 0 < sum(line.startswith("+ ") for line in lines) <= MOST_LINES


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_twin_makes_the_same_steps(
    layout: str, expected: tuple[list[float], dict[str, torch.Tensor]], mpiexec: Callable, tmp_path: Path
) -> None:
    ranks, keys = LAYOUTS[layout]
    (tmp_path / "train.py").write_text(examples()[1])
    root = str(Path(hpcdist.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    done = mpiexec(ranks, ["train.py"], cwd=tmp_path, env={**keys, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout
    known, saved = expected
    assert len(known) == 5
    np.testing.assert_allclose(losses(done.stdout), known, rtol=2e-4)  # of four digits after the point
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


def test_masks_groups_and_a_sampler_in_a_pipeline_of_shards(mpiexec: Callable, tmp_path: Path) -> None:
    """The losses are those of plain PyTorch; ranks that draw by themselves are named, and make no step."""
    (tmp_path / "train.py").write_text(SEVERAL + ON_RANKS)
    root = str(Path(hpcdist.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    done = mpiexec(4, ["train.py"], cwd=tmp_path, env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout
    scope: dict = {}
    exec(compile(SEVERAL, "train_plain.py", "exec"), scope)
    model, dataset, optimizer = scope["model"], scope["dataset"], scope["optimizer"]
    expected = []
    for step in range(8):
        chosen = [dataset[index] for index in Order(0, 60).indices(16 * step, 16)]
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
    refused = "step 3: rank(s) 2 bring other inputs than rank 0, and all of them compute replica 0, on the same samples"
    assert f"refused: {refused}" in done.stdout and "batch_sampler=training.sampler(dataset)" in done.stdout
