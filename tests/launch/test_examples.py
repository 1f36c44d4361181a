"""The programs in hpcdist/docs/examples, as a reader starts them on two ranks."""

import os
import re
import shutil
from pathlib import Path

import pytest

import hpcdist
from harness import jobs

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


def test_sweep_example_runs_directly_and_as_a_job_array(tmp_path):
    shutil.copy(EXAMPLES / "sweep.toml", tmp_path)
    listed = jobs.hpcdist("bench", "sweep", "sweep.toml", "--list", cwd=tmp_path)
    assert listed.returncode == 0 and len(listed.stdout.splitlines()) >= 9, listed
    words = ("--array", "sweep.toml", "--nodes", "1", "--ranks-per-node", "2", "--site", "slurm-openmpi", "--dry-run")
    script = jobs.hpcdist("submit", *words, cwd=tmp_path)
    assert script.returncode == 0 and "#SBATCH --array=0-8" in script.stdout, script
