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
