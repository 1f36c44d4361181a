"""Data in HDF5 with filters that h5py does not have: told before a job trains, and read where hdf5plugin is."""

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from harness import jobs
from harness.jobs import LIMIT_S
from harness.marks import cases
from hpcdist.cli.doctor import job
from hpcdist.comm.doctor import mpi_library
from hpcdist.errors import MISSING_CAPABILITY, MissingCapabilityError
from hpcdist.hdf5 import files
from hpcdist.training.data import files as data_files
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe import requirements

ZSTD, NOBODYS = 32015, 60123  # what hdf5plugin has, and a number that is nobody's
TOKENS = np.arange(4096, dtype=np.uint8)
RECIPE = "[run]\nsteps = 2\nglobal_batch = 2\n[model]\nlayers = 1\nhidden = 16\nheads = 1\n[data]\ncontext = 8\n"


@pytest.fixture
def plain(monkeypatch):
    """A Python without hdf5plugin, also where it is installed."""
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    if h5py.h5z.filter_avail(ZSTD):
        pytest.skip("zstd is there already: a test before has imported hdf5plugin, or HDF5_PLUGIN_PATH has it")


def write(path, code, name="tokens", array=TOKENS):
    """Make a dataset with a filter that is not here; what lies in its chunk is what no filter has seen."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk(array.shape)
    properties.set_filter(code, h5py.h5z.FLAG_OPTIONAL, ())  # else HDF5 makes no such dataset
    with h5py.File(path, "a") as file:
        space = h5py.h5s.create_simple(array.shape)
        kind = h5py.h5t.py_create(array.dtype)
        dataset = h5py.h5d.create(file.id, name.encode(), kind, space, properties)
        dataset.write_direct_chunk((0,) * array.ndim, array.tobytes(), 0)
    return path


@cases(
    "code, told",
    (ZSTD, f"HDF5 filter zstd ({ZSTD}), for which {sys.executable} needs the module hdf5plugin: pip install"),
    (NOBODYS, f"({NOBODYS}), which is not known here: set HDF5_PLUGIN_PATH"),
)
def test_a_filter_that_is_not_there_is_told_when_the_data_is_opened(plain, tmp_path, code, told):
    path = write(tmp_path / "data.h5", code)
    with pytest.raises(MissingCapabilityError) as caught:
        data_files.hdf5_tokens(path)
    assert str(caught.value).startswith(f"data.path = {path}: dataset /tokens has the ") and told in str(caught.value)
    assert caught.value.exit_code == MISSING_CAPABILITY
    assert data_files.missing_filters(path) == [str(caught.value)]


def test_a_source_of_a_virtual_dataset_has_it(plain, tmp_path):
    source = write(tmp_path / "source.h5", ZSTD, "part")
    layout = h5py.VirtualLayout(shape=(4096,), dtype=np.uint8)
    layout[:] = h5py.VirtualSource(str(source), "part", shape=(4096,))
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_virtual_dataset("tokens", layout)
    with pytest.raises(MissingCapabilityError, match=r"source\.h5: dataset /part has the HDF5 filter zstd"):
        data_files.hdf5_tokens(tmp_path / "data.h5")


def test_what_was_written_without_its_filter_is_read(plain, tmp_path):
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((64,))
    properties.set_filter(ZSTD, h5py.h5z.FLAG_OPTIONAL, ())
    with h5py.File(tmp_path / "data.h5", "w") as file:
        space = h5py.h5s.create_simple((4096,))
        dataset = h5py.h5d.create(file.id, b"tokens", h5py.h5t.NATIVE_UINT8, space, properties)
        h5py.Dataset(dataset)[:] = TOKENS  # the filter is optional, and not there to be applied
    assert np.array_equal(data_files.hdf5_tokens(tmp_path / "data.h5")[:], TOKENS)
    assert data_files.missing_filters(tmp_path / "data.h5") == []


@pytest.mark.parametrize("filters", [{}, {"compression": "gzip", "shuffle": True}, {"compression": "lzf"}])
def test_filters_of_h5py_need_nothing(tmp_path, filters):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("tokens", data=TOKENS, **filters)
    assert data_files.missing_filters(tmp_path / "data.h5") == []
    assert np.array_equal(data_files.hdf5_tokens(tmp_path / "data.h5")[:], TOKENS)


def test_both_datasets_of_a_table_are_looked_at(plain, tmp_path):
    path = write(tmp_path / "data.h5", NOBODYS, "x", np.ones((8, 4), np.float32))
    write(path, ZSTD, "y", np.ones(8, np.int64))
    first, second = data_files.missing_filters(path)
    assert "dataset /x has" in first and "dataset /y has" in second


def test_the_staged_copy_counts_where_it_is_and_no_file_needs_nothing(plain, tmp_path):
    path = write(tmp_path / "data.h5", ZSTD)

    def lacking(**data):
        return requirements._missing_hdf5_filters(SimpleNamespace(**{"path": "", "staged": ""} | data))

    assert len(lacking(path=str(path))) == 1
    assert len(lacking(path=str(path), staged=str(tmp_path / "not there yet"))) == 1
    assert "staged.h5" in lacking(path=str(path), staged=str(path.rename(tmp_path / "staged.h5")))[0]
    (tmp_path / "text").write_text("no HDF5")
    os.mkfifo(tmp_path / "pipe")
    for path in ("", str(tmp_path), str(tmp_path / "text"), str(tmp_path / "pipe"), str(tmp_path / "nowhere")):
        assert lacking(path=path) == []


def run(folder, *line, **environment):
    """Run hpcdist on its own, where nothing has imported hdf5plugin; in ``hidden`` there is none to be found."""
    (folder / "hidden" / "hdf5plugin").mkdir(parents=True, exist_ok=True)
    (folder / "hidden" / "hdf5plugin" / "__init__.py").write_text("raise ModuleNotFoundError('no hdf5plugin')\n")
    (folder / "recipe.toml").write_text(RECIPE + "path = 'data.h5'\n")
    return jobs.hpcdist(*line, env={**os.environ, "HPCDIST_TUNING": "off", **environment}, cwd=folder)


@pytest.mark.full
def test_submit_the_doctor_of_a_job_and_the_training_say_it(tmp_path):
    write(tmp_path / "data.h5", ZSTD)
    without = {"PYTHONPATH": str(tmp_path / "hidden"), "PATH": "/usr/bin:/bin"}
    told = "data.h5: dataset /tokens has the HDF5 filter zstd (32015), for which"
    done = run(tmp_path, "submit", "recipe.toml", "--nodes=1", "--site=workstation", **without)
    assert (done.returncode, done.stdout) == (MISSING_CAPABILITY, "") and told in done.stderr
    dry = run(tmp_path, "submit", "recipe.toml", "--nodes=1", "--site=workstation", "--dry-run", **without)
    assert dry.returncode == 0 and "warning: data.path = " in dry.stderr and told in dry.stderr
    trained = run(tmp_path, "train", "recipe.toml", "--out=run", **without)
    assert trained.returncode == MISSING_CAPABILITY and told in trained.stderr
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_the_doctor_of_a_job_names_file_and_package(plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data.h5", ZSTD)
    (tmp_path / "recipe.toml").write_text(RECIPE + "path = 'data.h5'\n")
    (tmp_path / "job.toml").write_text(recipes.dump(recipes.load(tmp_path / "recipe.toml", [], {}).recipe))
    found = job._packages(tmp_path / "job.toml")
    assert found.status == mpi_library.FAIL and "data.h5: dataset /tokens has the HDF5 filter zstd" in found.found


def test_a_broken_package_is_told(plain, tmp_path, monkeypatch):
    (tmp_path / "hdf5plugin.py").write_text("raise RuntimeError('made for another HDF5')\n")
    monkeypatch.delitem(sys.modules, "hdf5plugin")
    monkeypatch.syspath_prepend(tmp_path)
    with h5py.File(write(tmp_path / "data.h5", ZSTD)) as file, pytest.raises(MissingCapabilityError) as caught:
        files.storage_of(file["tokens"])
    assert "module hdf5plugin: it is there, and cannot be imported: made for another HDF5" in str(caught.value)


@pytest.mark.full
def test_with_the_package_the_filter_works(tmp_path):
    if importlib.util.find_spec("hdf5plugin") is None:
        pytest.skip("there is no hdf5plugin")
    program = (
        "import sys, h5py, hdf5plugin, numpy as np\n"
        "h5py.File(sys.argv[1], 'w').create_dataset('tokens', data=np.arange(4096, dtype=np.uint8), "
        "**hdf5plugin.Zstd())\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "data.h5")], check=True, timeout=LIMIT_S)
    done = run(tmp_path, "submit", "recipe.toml", "--nodes=1", "--site=workstation", "--dry-run")
    assert done.returncode == 0 and "hdf5plugin" not in done.stderr
    trained = run(tmp_path, "train", "recipe.toml", "--out=run")
    assert trained.returncode == 0, trained.stderr
