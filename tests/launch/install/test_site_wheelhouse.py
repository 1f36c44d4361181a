"""install.sh of a wheelhouse: it installs from its files alone, and rejects damaged files and another Python."""

import configparser
import os
import sys
import zipfile
from pathlib import Path

import pytest

import hpcdist
from harness import jobs
from harness.inputs import make_wheel
from hpcdist.batch import wheelhouse

CLONE = Path(hpcdist.__file__).resolve().parents[1]
ENTRY = "[console_scripts]\nhpcdist = hpcdist:main\n"
MODULE = "def main():\n    print('a stand-in of hpcdist')\n"

pytestmark = pytest.mark.full


@pytest.fixture
def wheelhouse_dir(tmp_path, monkeypatch):
    """A wheelhouse of two small wheels."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    make_wheel(tmp_path, "mpi4py", "4.1.9")
    local_data = make_wheel(tmp_path, "hpcdist", "0.1.0", "Requires-Dist: mpi4py >= 4.1", module=MODULE, entry=ENTRY)
    return wheelhouse.collect(wheelhouse.WheelhouseOrder(output=tmp_path / "house", wheel=local_data)).folder


def install(wheelhouse_dir, venv, **added):
    """Run the script as on a node where pip is configured for an unreachable index."""
    hidden = ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PYTHONPATH", "MPICC")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PYTHON": sys.executable}
    return jobs.run(
        [str(wheelhouse_dir / "install.sh"), str(venv)], env=kept | nowhere | added, cwd=wheelhouse_dir.parent
    )


def test_environment_is_installed_from_the_files_alone(wheelhouse_dir, tmp_path):
    done = install(wheelhouse_dir, tmp_path / "a venv")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "a stand-in of hpcdist"
    ask = "import importlib.metadata as m; print(m.version('mpi4py'), m.version('hpcdist'))"
    output = jobs.run([tmp_path / "a venv" / "bin" / "python", "-c", ask], cwd=tmp_path, check=True)
    assert output.stdout.split() == ["4.1.9", "0.1.0"]
    again = install(wheelhouse_dir, tmp_path / "a venv")
    assert again.returncode == 2 and "exists" in again.stderr


def test_bad_inputs_are_rejected_before_anything_is_created(wheelhouse_dir, tmp_path):
    source = install(wheelhouse_dir, tmp_path / "venv", MPICC="mpicc")
    assert source.returncode == 69 and "--with-mpi4py-source" in source.stderr
    assert install(wheelhouse_dir, Path("--help")).returncode == 2
    absent = install(wheelhouse_dir, tmp_path / "venv", PYTHON="/nowhere/python3")
    assert absent.returncode == 69 and "does not run" in absent.stderr
    wheel = next(wheelhouse_dir.glob("mpi4py-*.whl"))
    wheel.write_bytes(wheel.read_bytes()[:-1])
    damaged = install(wheelhouse_dir, tmp_path / "venv")
    assert damaged.returncode == 74 and wheel.name in damaged.stdout + damaged.stderr
    assert not (tmp_path / "venv").exists()


def test_wheels_for_another_python_are_rejected(wheelhouse_dir, tmp_path):
    (tmp_path / "python3.99").write_text("#!/bin/sh\necho 3.99\n")
    (tmp_path / "python3.99").chmod(0o755)
    done = install(wheelhouse_dir, tmp_path / "venv", PYTHON=str(tmp_path / "python3.99"))
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert done.returncode == 69 and f"for Python {here}" in done.stderr and "3.99" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_wheelhouse_contains_a_wheel_built_from_the_clone(tmp_path, monkeypatch):
    pytest.importorskip("setuptools")
    settings = configparser.ConfigParser()
    if not settings.read(CLONE / "setup.cfg"):
        pytest.skip("hpcdist is installed, there is no clone to build from")
    for line in settings["options"]["install_requires"].strip().splitlines():
        make_wheel(tmp_path, line.split()[0].replace("-", "_"), "99.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    pip = wheelhouse._pip

    def without_network(first, *words):
        """Build with this environment's setuptools, because pip would download setuptools."""
        pip(first, *(["--no-build-isolation"] if first == "wheel" else []), *words)

    monkeypatch.setattr(wheelhouse, "_pip", without_network)
    before = {path.name for path in CLONE.iterdir()}
    summaries = wheelhouse.collect(wheelhouse.WheelhouseOrder(output=tmp_path / "house"))
    assert {path.name for path in CLONE.iterdir()} == before, "nothing is left in the clone"
    (local_data,) = summaries.folder.glob(f"hpcdist-{hpcdist.__version__}-*.whl")
    names = set(zipfile.ZipFile(local_data).namelist())
    install = CLONE / "slurm" / "install"
    inside = {f"hpcdist/batch/{path.relative_to(CLONE)}" for path in install.rglob("*") if path.is_file()}
    assert {"hpcdist/cli/main.py", "hpcdist/batch/slurm/install/spack_repo/hpcdist/repo.yaml"} | inside <= names
    assert len((summaries.folder / "requirements.txt").read_text().splitlines()) == 3 + len(
        list(tmp_path.glob("*.whl"))
    )
