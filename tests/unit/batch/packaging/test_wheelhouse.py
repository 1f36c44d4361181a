"""A wheelhouse is complete, its hashes are those of its files, and pip takes it as it is: on an index made here."""

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
from hpcdist.batch.packaging import wheelhouse
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
    """Write mpi4py-4.1.9.tar.gz, which pip can look at without building it."""
    project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    with tarfile.open(folder / "mpi4py-4.1.9.tar.gz", "w:gz") as archive:
        for name, text in {"pyproject.toml": project, "backend.py": BACKEND, "PKG-INFO": "Name: mpi4py\n"}.items():
            entry = tarfile.TarInfo(f"mpi4py-4.1.9/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A wheel of hpcdist, and an index, the only one that pip sees, with what it needs."""
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


def pinned(folder):
    """Return name==version -> hashes."""
    lines = (folder / "requirements.txt").read_text().splitlines()
    split = [line.split(" --hash=sha256:") for line in lines if not line.startswith("#")]
    return {words[0]: words[1:] for words in split}


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def install(folder, target):
    """Run the line of the help."""
    line = f"install --no-index --find-links {folder} --require-hashes -r {folder}/requirements.txt --target {target}"
    kept = {name: value for name, value in os.environ.items() if name not in ("PIP_FIND_LINKS", "PYTHONPATH")}
    return jobs.run([sys.executable, "-m", "pip", *line.split()], env=kept)


@pytest.mark.full
def test_pip_installs_what_was_collected_and_refuses_another_byte(own, tmp_path):
    fixed = tmp_path / "fixed.txt"
    fixed.write_text("gamma == 2.0\n")
    order = wheelhouse.WheelhouseOrder(output=tmp_path / "house", wheel=own, extras=("cuda12x",), requirements=(fixed,))
    found = wheelhouse.collect(order)
    wheels = {path.name.split("-")[0]: path for path in found.folder.glob("*.whl")}
    assert set(wheels) == {"hpcdist", "mpi4py", "Alpha_Beta", "gamma", "delta"}
    assert pinned(found.folder) == {
        "alpha-beta==1.5": [sha256(wheels["Alpha_Beta"])],
        "delta==3.0": [sha256(wheels["delta"])],
        "gamma==2.0": [sha256(wheels["gamma"])],
        "hpcdist==0.1.0": [sha256(wheels["hpcdist"])],
        "mpi4py==4.1.9": [sha256(wheels["mpi4py"])],
    }
    done = install(found.folder, tmp_path / "target")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "target" / "Alpha_Beta.py").exists()
    make_wheel(found.folder, "gamma", "2.0", "Summary: another one")
    refused = install(found.folder, tmp_path / "other")
    assert refused.returncode != 0 and "gamma" in refused.stderr and "HASH" in refused.stderr.upper()


def test_the_source_of_mpi4py_comes_with_what_builds_it(own, tmp_path):
    found = wheelhouse.collect(wheelhouse.WheelhouseOrder(output=tmp_path / "house", wheel=own, mpi4py_source=True))
    wheel, source = (next(found.folder.glob(f"mpi4py-*{end}")) for end in (".whl", ".tar.gz"))
    assert pinned(found.folder)["mpi4py==4.1.9"] == [sha256(wheel), sha256(source)]
    names = {path.name for path in found.folder.iterdir()}
    assert {f"{name}-99.0-py3-none-any.whl" for name in ("setuptools", "build", "cython")} <= names
    assert not any(name.startswith(("setuptools", "build", "cython")) for name in pinned(found.folder))
    sums = dict(line.split("  ")[::-1] for line in (found.folder / "SHA256SUMS").read_text().splitlines())
    assert sums == {name: sha256(found.folder / name) for name in names - {"SHA256SUMS"}}
    assert found.files == len(names) and found.nbytes == sum(path.stat().st_size for path in found.folder.iterdir())
    assert os.access(found.folder / "install.sh", os.X_OK)


def test_wheels_for_another_machine(own, tmp_path):
    index = tmp_path / "index"
    make_wheel(index, "gamma", "2.5", tag="cp312-cp312-manylinux_2_17_aarch64")
    make_wheel(index, "gamma", "2.9", tag="cp312-cp312-manylinux_2_39_aarch64")
    there = wheelhouse.WheelhouseOrder(
        output=tmp_path / "house", wheel=own, platform="manylinux_2_28_aarch64", python_version="3.12"
    )
    found = wheelhouse.collect(there)
    assert "gamma==2.5" in pinned(found.folder)
    assert "# python 3.12" in (found.folder / "requirements.txt").read_text().splitlines()


def test_the_command_prints_the_folder_alone_and_warns_of_mpi4py(own, tmp_path):
    said = CliRunner().invoke(site_wheelhouse, ["--output", str(tmp_path / "house"), "--wheel", str(own)])
    assert said.exit_code == 0, said.output
    assert said.stdout == f"{tmp_path / 'house'}\n"
    assert "--with-mpi4py-source" in said.stderr and "7 files" in said.stderr


def test_what_cannot_be_had_leaves_nothing(own, tmp_path):
    (tmp_path / "index" / "gamma-2.0-py3-none-any.whl").unlink()
    with pytest.raises(MissingCapabilityError, match=r"pip download failed.*gamma.*PIP_INDEX_URL"):
        wheelhouse.collect(wheelhouse.WheelhouseOrder(output=tmp_path / "out" / "house", wheel=own))
    assert list((tmp_path / "out").iterdir()) == []


@cases(
    "wrong, message",
    ({"extras": ("cuda12",)}, r"no extra 'cuda12'; the nearest known is 'cuda12x'"),
    ({"python_version": "3.10"}, r"needs Python >=3\.11"),
    ({"python_version": "3"}, r"expected two numbers"),
    ({"platform": "linux_x86_64"}, r"manylinux_2_28_x86_64"),
    ({"platform": "manylinux_2_4_x86_64"}, r"the oldest on x86_64 is manylinux_2_5"),
    ({"wheel": Path("hpcdist-0.1.0.tar.gz")}, r"is no wheel"),
    ({"wheel": Path("nowhere/hpcdist-0.1.0-py3-none-any.whl")}, r"there is no such file"),
)
def test_refusals(own, tmp_path, wrong, message):
    with pytest.raises(UsageError, match=message):
        wheelhouse.collect(wheelhouse.WheelhouseOrder(**{"output": tmp_path / "house", "wheel": own, **wrong}))
    assert not (tmp_path / "house").exists()


def test_a_folder_with_files_and_another_project_are_refused(own, tmp_path):
    with pytest.raises(UsageError, match="not an empty folder"):
        wheelhouse.collect(wheelhouse.WheelhouseOrder(output=tmp_path, wheel=own))
    with pytest.raises(UsageError, match="a wheel of gamma"):
        wheelhouse.collect(
            wheelhouse.WheelhouseOrder(output=tmp_path / "house", wheel=make_wheel(tmp_path, "gamma", "2.0"))
        )
    own.write_bytes(b"no zip")
    with pytest.raises(UsageError, match="damaged"):
        wheelhouse.collect(wheelhouse.WheelhouseOrder(output=tmp_path / "house", wheel=own))


def test_without_a_clone_the_own_wheel_must_be_given(own, tmp_path, monkeypatch):
    monkeypatch.setattr("hpcdist.__file__", str(tmp_path / "lib" / "hpcdist" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="--wheel FILE"):
        wheelhouse.collect(wheelhouse.WheelhouseOrder(output=tmp_path / "house"))


def test_in_a_clone_the_own_wheel_is_built_from_it(tmp_path, monkeypatch):
    """Also where another hpcdist runs, as of the environment that is active."""
    clone = Path(__file__).resolve().parents[4]
    monkeypatch.setattr("hpcdist.__file__", str(tmp_path / "lib" / "hpcdist" / "__init__.py"))
    monkeypatch.chdir(clone)

    def pip(*words):
        *_, folder, source = words
        assert (Path(source) / "setup.cfg").read_bytes() == (clone / "setup.cfg").read_bytes()
        (Path(folder) / "hpcdist-0.1.0-py3-none-any.whl").touch()

    monkeypatch.setattr(wheelhouse, "_pip", pip)
    assert wheelhouse._own_wheel(tmp_path, None) == tmp_path / "hpcdist-0.1.0-py3-none-any.whl"


@given(minor=st.integers(17, 60), machine=st.sampled_from(["x86_64", "aarch64", "ppc64le"]))
def test_a_platform_takes_what_older_ones_take(minor, machine):
    tags = wheelhouse.compatible_tags(f"manylinux_2_{minor}_{machine}")
    assert tags[0] == f"manylinux_2_{minor}_{machine}" and f"manylinux2014_{machine}" in tags
    assert len(set(tags)) == len(tags) and all(tag.endswith(machine) for tag in tags)
    versions = [int(match[1]) for tag in tags if (match := re.match(r"manylinux_2_(\d+)_", tag))]
    assert versions == sorted(versions, reverse=True) and versions[0] == minor
    assert set(wheelhouse.compatible_tags(f"manylinux_2_{minor + 1}_{machine}")) > set(tags)
