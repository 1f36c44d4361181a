"""A wheelhouse is complete, its hashes match its files, and pip can install it. The package index is made here."""

import hashlib
import io
import os
import re
import sys
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from harness import jobs
from harness.inputs import make_wheel
from harness.marks import cases
from hpcdist.batch import wheelhouse
from hpcdist.cli.site import wheelhouse as site_wheelhouse
from hpcdist.errors import MissingCapabilityError, UsageError

BACKEND = """
import os
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    os.mkdir(os.path.join(folder, "mpi4py-4.1.9.dist-info"))
    with open(os.path.join(folder, "mpi4py-4.1.9.dist-info", "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: mpi4py\\nVersion: 4.1.9\\n")
    return "mpi4py-4.1.9.dist-info"
def build_wheel(folder, config_settings=None, metadata_directory=None):
    raise SystemExit("nothing is built when it is downloaded")
"""


def make_source(folder):
    """Write mpi4py-4.1.9.tar.gz, a source package that pip can inspect without building it."""
    project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    with tarfile.open(folder / "mpi4py-4.1.9.tar.gz", "w:gz") as archive:
        for name, text in {"pyproject.toml": project, "backend.py": BACKEND, "PKG-INFO": "Name: mpi4py\n"}.items():
            entry = tarfile.TarInfo(f"mpi4py-4.1.9/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))


@pytest.fixture
def local_wheel(tmp_path, monkeypatch):
    """A wheel of hpcdist, and a package index with its dependencies, the only index that pip sees."""
    index = tmp_path / "index"
    index.mkdir()
    make_wheel(index, "mpi4py", "4.1.9")
    make_wheel(index, "mpi4py", "4.0.9")
    make_wheel(index, "Alpha_Beta", "1.5", "Requires-Dist: gamma")
    make_wheel(index, "gamma", "2.0")
    make_wheel(index, "delta", "3.0")
    for name in ("setuptools", "build", "cython"):
        make_wheel(index, name, "99.0")
    make_source(index)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    lines = [f"Requires-Dist: {need}" for need in ("mpi4py >= 4.1", "alpha-beta", 'delta; extra == "cuda12x"')]
    extras = [f"Provides-Extra: {name}" for name in ("cuda12x", "nvml")]
    return make_wheel(tmp_path, "hpcdist", "0.1.0", "Requires-Python: >=3.11", *extras, *lines)


def pinned_hashes(folder):
    """Return the hashes of each name==version."""
    lines = (folder / "requirements.txt").read_text().splitlines()
    split = [line.split(" --hash=sha256:") for line in lines if not line.startswith("#")]
    return {words[0]: words[1:] for words in split}


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def install(folder, target):
    """Install with the pip command that the help text shows."""
    line = f"install --no-index --find-links {folder} --require-hashes -r {folder}/requirements.txt --target {target}"
    kept = {name: value for name, value in os.environ.items() if name not in ("PIP_FIND_LINKS", "PYTHONPATH")}
    return jobs.run([sys.executable, "-m", "pip", *line.split()], env=kept)


@pytest.mark.full
def test_pip_installs_wheelhouse_and_rejects_changed_files(local_wheel, tmp_path):
    fixed = tmp_path / "fixed.txt"
    fixed.write_text("gamma == 2.0\n")
    order = wheelhouse.WheelhouseOrder(
        output=tmp_path / "house", wheel=local_wheel, extras=("cuda12x",), requirements=(fixed,)
    )
    summaries = wheelhouse.collect(order)
    wheels = {path.name.split("-")[0]: path for path in summaries.folder.glob("*.whl")}
    assert set(wheels) == {"hpcdist", "mpi4py", "Alpha_Beta", "gamma", "delta"}
    assert pinned_hashes(summaries.folder) == {
        "alpha-beta==1.5": [sha256(wheels["Alpha_Beta"])],
        "delta==3.0": [sha256(wheels["delta"])],
        "gamma==2.0": [sha256(wheels["gamma"])],
        "hpcdist==0.1.0": [sha256(wheels["hpcdist"])],
        "mpi4py==4.1.9": [sha256(wheels["mpi4py"])],
    }
    done = install(summaries.folder, tmp_path / "target")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "target" / "Alpha_Beta.py").exists()
    make_wheel(summaries.folder, "gamma", "2.0", "Summary: another one")
    refused = install(summaries.folder, tmp_path / "other")
    assert refused.returncode != 0 and "gamma" in refused.stderr and "HASH" in refused.stderr.upper()


def test_mpi4py_source_includes_its_build_requirements(local_wheel, tmp_path):
    summaries = wheelhouse.collect(
        wheelhouse.WheelhouseOrder(output=tmp_path / "house", wheel=local_wheel, mpi4py_source=True)
    )
    wheel, source = (next(summaries.folder.glob(f"mpi4py-*{end}")) for end in (".whl", ".tar.gz"))
    assert pinned_hashes(summaries.folder)["mpi4py==4.1.9"] == [sha256(wheel), sha256(source)]
    names = {path.name for path in summaries.folder.iterdir()}
    assert {f"{name}-99.0-py3-none-any.whl" for name in ("setuptools", "build", "cython")} <= names
    assert not any(name.startswith(("setuptools", "build", "cython")) for name in pinned_hashes(summaries.folder))
    sums = dict(line.split("  ")[::-1] for line in (summaries.folder / "SHA256SUMS").read_text().splitlines())
    assert sums == {name: sha256(summaries.folder / name) for name in names - {"SHA256SUMS"}}
    nbytes = sum(path.stat().st_size for path in summaries.folder.iterdir())
    assert (summaries.files, summaries.nbytes) == (len(names), nbytes)
    assert os.access(summaries.folder / "install.sh", os.X_OK)


def test_platform_option_collects_wheels_for_another_machine(local_wheel, tmp_path):
    index = tmp_path / "index"
    make_wheel(index, "gamma", "2.5", tag="cp312-cp312-manylinux_2_17_aarch64")
    make_wheel(index, "gamma", "2.9", tag="cp312-cp312-manylinux_2_39_aarch64")
    there = wheelhouse.WheelhouseOrder(
        output=tmp_path / "house", wheel=local_wheel, platform="manylinux_2_28_aarch64", python_version="3.12"
    )
    summaries = wheelhouse.collect(there)
    assert "gamma==2.5" in pinned_hashes(summaries.folder)
    assert "# python 3.12" in (summaries.folder / "requirements.txt").read_text().splitlines()


def test_command_prints_the_folder_and_warns_about_mpi4py(local_wheel, tmp_path):
    output = CliRunner().invoke(site_wheelhouse, ["--output", str(tmp_path / "house"), "--wheel", str(local_wheel)])
    assert output.exit_code == 0, output.output
    assert output.stdout == f"{tmp_path / 'house'}\n"
    assert "--with-mpi4py-source" in output.stderr and "7 files" in output.stderr


def test_failed_download_leaves_no_files(local_wheel, tmp_path):
    (tmp_path / "index" / "gamma-2.0-py3-none-any.whl").unlink()
    with pytest.raises(MissingCapabilityError, match=r"pip download failed.*gamma.*PIP_INDEX_URL"):
        wheelhouse.collect(wheelhouse.WheelhouseOrder(output=tmp_path / "out" / "house", wheel=local_wheel))
    assert list((tmp_path / "out").iterdir()) == []


@cases(
    "wrong, message",
    ({"extras": ("cuda12",)}, r"no extra 'cuda12'; the nearest known is 'cuda12x'"),
    ({"python_version": "3.10"}, r"needs Python >=3\.11"),
    ({"python_version": "3"}, r"expected two numbers"),
    ({"platform": "linux_x86_64"}, r"manylinux_2_28_x86_64"),
    ({"platform": "manylinux_2_4_x86_64"}, r"the oldest for x86_64 is manylinux_2_5"),
    ({"wheel": Path("hpcdist-0.1.0.tar.gz")}, r"is not a wheel"),
    ({"wheel": Path("nowhere/hpcdist-0.1.0-py3-none-any.whl")}, r"does not exist"),
)
def test_invalid_orders_are_rejected(local_wheel, tmp_path, wrong, message):
    with pytest.raises(UsageError, match=message):
        wheelhouse.collect(wheelhouse.WheelhouseOrder(**{"output": tmp_path / "house", "wheel": local_wheel, **wrong}))
    assert not (tmp_path / "house").exists()


def test_nonempty_folder_and_foreign_wheel_are_rejected(local_wheel, tmp_path):
    with pytest.raises(UsageError, match="not an empty folder"):
        wheelhouse.collect(wheelhouse.WheelhouseOrder(output=tmp_path, wheel=local_wheel))
    with pytest.raises(UsageError, match="a wheel of gamma"):
        wheelhouse.collect(
            wheelhouse.WheelhouseOrder(output=tmp_path / "house", wheel=make_wheel(tmp_path, "gamma", "2.0"))
        )
    local_wheel.write_bytes(b"no zip")
    with pytest.raises(UsageError, match="damaged"):
        wheelhouse.collect(wheelhouse.WheelhouseOrder(output=tmp_path / "house", wheel=local_wheel))


def test_wheel_option_is_required_outside_a_clone(local_wheel, tmp_path, monkeypatch):
    monkeypatch.setattr("hpcdist.__file__", str(tmp_path / "lib" / "hpcdist" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="--wheel FILE"):
        wheelhouse.collect(wheelhouse.WheelhouseOrder(output=tmp_path / "house"))


def test_wheel_is_built_from_the_current_clone(tmp_path, monkeypatch):
    """This also holds if another hpcdist runs, for example the hpcdist of the active environment."""
    clone = Path(__file__).resolve().parents[3]
    monkeypatch.setattr("hpcdist.__file__", str(tmp_path / "lib" / "hpcdist" / "__init__.py"))
    monkeypatch.chdir(clone)

    def pip(*words):
        *_, folder, source = words
        assert (Path(source) / "setup.cfg").read_bytes() == (clone / "setup.cfg").read_bytes()
        (Path(folder) / "hpcdist-0.1.0-py3-none-any.whl").touch()

    monkeypatch.setattr(wheelhouse, "_pip", pip)
    assert wheelhouse._own_wheel(tmp_path, None) == tmp_path / "hpcdist-0.1.0-py3-none-any.whl"


@given(minor=st.integers(17, 60), machine=st.sampled_from(["x86_64", "aarch64", "ppc64le"]))
def test_compatible_tags_include_all_older_platforms(minor, machine):
    tags = wheelhouse.compatible_tags(f"manylinux_2_{minor}_{machine}")
    assert tags[0] == f"manylinux_2_{minor}_{machine}" and f"manylinux2014_{machine}" in tags
    assert len(set(tags)) == len(tags) and all(tag.endswith(machine) for tag in tags)
    versions = [int(match[1]) for tag in tags if (match := re.match(r"manylinux_2_(\d+)_", tag))]
    assert versions == sorted(versions, reverse=True) and versions[0] == minor
    assert set(wheelhouse.compatible_tags(f"manylinux_2_{minor + 1}_{machine}")) > set(tags)
