"""A wheelhouse's install.sh makes an environment of files alone, and refuses what is damaged or for another Python."""

import configparser
import os
import sys
import zipfile
from pathlib import Path

import pytest

import hpcdist
from harness import jobs
from harness.inputs import make_wheel
from hpcdist.batch.packaging import wheelhouse

CLONE = Path(hpcdist.__file__).resolve().parents[1]
ENTRY = "[console_scripts]\nhpcdist = hpcdist:main\n"
MODULE = "def main():\n    print('a stand-in of hpcdist')\n"

pytestmark = pytest.mark.full


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A wheelhouse of two small wheels."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    make_wheel(tmp_path, "mpi4py", "4.1.9")
    own = make_wheel(tmp_path, "hpcdist", "0.1.0", "Requires-Dist: mpi4py >= 4.1", module=MODULE, entry=ENTRY)
    return wheelhouse.collect(wheelhouse.WheelhouseOrder(output=tmp_path / "house", wheel=own)).folder


def install(house, venv, **added):
    """Run the script as on a node whose settings of pip point nowhere."""
    hidden = ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PYTHONPATH", "MPICC")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PYTHON": sys.executable}
    return jobs.run([str(house / "install.sh"), str(venv)], env=kept | nowhere | added, cwd=house.parent)


def test_an_environment_is_made_of_the_files_alone(house, tmp_path):
    done = install(house, tmp_path / "a venv")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "a stand-in of hpcdist"
    ask = "import importlib.metadata as m; print(m.version('mpi4py'), m.version('hpcdist'))"
    said = jobs.run([tmp_path / "a venv" / "bin" / "python", "-c", ask], cwd=tmp_path, check=True)
    assert said.stdout.split() == ["4.1.9", "0.1.0"]
    again = install(house, tmp_path / "a venv")
    assert again.returncode == 2 and "exists" in again.stderr


def test_what_cannot_work_is_refused_before_anything_is_made(house, tmp_path):
    source = install(house, tmp_path / "venv", MPICC="mpicc")
    assert source.returncode == 69 and "--with-mpi4py-source" in source.stderr
    assert install(house, Path("--help")).returncode == 2
    absent = install(house, tmp_path / "venv", PYTHON="/nowhere/python3")
    assert absent.returncode == 69 and "does not run" in absent.stderr
    wheel = next(house.glob("mpi4py-*.whl"))
    wheel.write_bytes(wheel.read_bytes()[:-1])
    damaged = install(house, tmp_path / "venv")
    assert damaged.returncode == 74 and wheel.name in damaged.stdout + damaged.stderr
    assert not (tmp_path / "venv").exists()


def test_wheels_for_another_python_are_refused(house, tmp_path):
    (tmp_path / "python3.99").write_text("#!/bin/sh\necho 3.99\n")
    (tmp_path / "python3.99").chmod(0o755)
    done = install(house, tmp_path / "venv", PYTHON=str(tmp_path / "python3.99"))
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert done.returncode == 69 and f"for Python {here}" in done.stderr and "3.99" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_the_own_wheel_is_built_from_the_clone(tmp_path, monkeypatch):
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
        """Build with this environment's setuptools, where pip would fetch one."""
        pip(first, *(["--no-build-isolation"] if first == "wheel" else []), *words)

    monkeypatch.setattr(wheelhouse, "_pip", without_network)
    before = {path.name for path in CLONE.iterdir()}
    found = wheelhouse.collect(wheelhouse.WheelhouseOrder(output=tmp_path / "house"))
    assert {path.name for path in CLONE.iterdir()} == before, "nothing is left in the clone"
    (own,) = found.folder.glob(f"hpcdist-{hpcdist.__version__}-*.whl")
    names = set(zipfile.ZipFile(own).namelist())
    install = CLONE / "slurm" / "install"
    inside = {f"hpcdist/batch/{path.relative_to(CLONE)}" for path in install.rglob("*") if path.is_file()}
    assert {"hpcdist/cli/main.py", "hpcdist/batch/slurm/install/spack_repo/hpcdist/repo.yaml"} | inside <= names
    assert len((found.folder / "requirements.txt").read_text().splitlines()) == 3 + len(list(tmp_path.glob("*.whl")))
