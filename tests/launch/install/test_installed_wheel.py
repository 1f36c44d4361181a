"""The installed package: the wheel has every module, needs no clone, and includes the command."""

import configparser
import os
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import hpcdist
from harness import jobs

CLONE = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not (CLONE / "setup.cfg").exists(), reason="there is no clone beside these tests to build from"),
]


def run(*arguments, folder, **environment):
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = jobs.run([sys.executable, *arguments], env=kept | environment, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of this clone, so that nothing is left in the clone."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 71:
        pytest.skip(f"setuptools {setuptools.__version__} cannot build a wheel by itself")
    source = tmp_path_factory.mktemp("source")
    listed = jobs.run(["git", "-C", str(CLONE), "ls-files", "--cached", "--others", "--exclude-standard"])
    if listed.returncode != 0:
        pytest.skip("these tests are not in a clone")
    for name in listed.stdout.splitlines():
        if (CLONE / name).is_file() and not name.startswith(("tests/", "benchmarks/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(CLONE / name, source / name)  # with its mode
    return source


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    run("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(out), str(source), folder=out)
    (built,) = out.glob("hpcdist-*.whl")
    return built


def test_wheel_contains_exactly_the_modules_of_the_package(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(CLONE)) for path in (CLONE / "hpcdist").rglob("*.py")}
    assert modules <= names
    assert {"hpcdist/py.typed", "hpcdist/CHANGELOG.md", "hpcdist/libexec/hpcdist"} <= names
    assert {name.split("/")[0] for name in names} == {"hpcdist", f"hpcdist-{hpcdist.__version__}.dist-info"}
    assert any(name.endswith("LICENSE") for name in names)
    assert resources() <= names


def resources():
    """Return the files of slurm/ and modulefiles/ by their names in a wheel."""
    places = {"slurm": "hpcdist/batch/slurm", "modulefiles": "hpcdist/batch/modulefiles"}
    return {
        f"{place}/{path.relative_to(CLONE / folder)}"
        for folder, place in places.items()
        for path in (CLONE / folder).rglob("*")
        if path.is_file()
    }


def test_source_distribution_contains_all_files_of_the_wheel(source, tmp_path):
    build = "import sys, setuptools.build_meta as build; build.build_sdist(sys.argv[1])"
    run("-c", build, str(tmp_path), folder=source)
    (built,) = tmp_path.glob("hpcdist-*.tar.gz")
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    results = [*(CLONE / "hpcdist").rglob("*.py"), *(CLONE / "slurm").rglob("*"), *(CLONE / "modulefiles").rglob("*")]
    expected = {str(path.relative_to(CLONE)) for path in results if path.is_file()}
    assert {
        "setup.cfg",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "slurm/templates/train.sbatch.j2",
    } | expected <= names


def test_wheel_works_without_the_clone(wheel, tmp_path):
    target = tmp_path / "installed"
    run("-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel), folder=tmp_path)
    where = run("-P", "-c", "import hpcdist; print(hpcdist.__file__)", folder=tmp_path, PYTHONPATH=str(target))
    assert Path(where.stdout.strip()).is_relative_to(target)
    assert "Commands:" in run(str(target / "bin" / "hpcdist"), "--help", folder=tmp_path, PYTHONPATH=str(target)).stdout
    alone = [str(target / "hpcdist" / "libexec" / "hpcdist"), "--version"]
    shown = jobs.run(alone, env=os.environ | {"PYTHONPATH": str(target)}, check=True)
    assert hpcdist.__version__ in shown.stdout, "the command of a modulefile"
    report = run("-P", "-m", "hpcdist", "doctor", folder=tmp_path, PYTHONPATH=str(target)).stdout
    assert f"hpcdist {hpcdist.__version__}" in report and "FAIL" not in report
    shown = run("-P", "-m", "hpcdist", "config", "show", folder=tmp_path, PYTHONPATH=str(target)).stdout
    assert "[model]" in shown
    # The wheel contains the modulefiles that it renders; it rejects others.
    code = "from hpcdist.cli.site import modulefile; modulefile()"
    there = str(target / "hpcdist" / "batch" / "modulefiles")
    run("-P", "-c", code, "--in-place", "--output", there, folder=tmp_path, PYTHONPATH=str(target))
    job = ["-P", "-m", "hpcdist", "submit", "--nodes=2", "--ranks-per-node=2", "--time=30", "--dry-run"]
    there = run(*job, folder=tmp_path, PYTHONPATH=str(target)).stdout
    here = run(*job, folder=tmp_path, PYTHONPATH=str(CLONE)).stdout
    assert f"PYTHONPATH={target}$" in there and f"PYTHONPATH={CLONE}$" in here
    # The Python that runs the job may itself lie in the clone: only where hpcdist is imported from may differ.
    assert there.replace(f"PYTHONPATH={target}$", "") == here.replace(f"PYTHONPATH={CLONE}$", "")


def test_extras_match_the_readme():
    settings = configparser.ConfigParser()
    settings.read(CLONE / "setup.cfg")
    extras = set(settings["options.extras_require"])
    assert extras >= {"workstation", "cuda12x", "cuda13x", "analysis", "test", "reference"}
    assert "torch" not in settings["options.extras_require"]["test"]
    assert "mpi" not in settings["options"]["install_requires"].replace("mpi4py", "")
