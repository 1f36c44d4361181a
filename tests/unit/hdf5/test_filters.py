"""HDF5 filters that h5py lacks: reported before a job trains, and readable with hdf5plugin."""

import importlib.util
import os
import subprocess
import sys

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
from hpcdist.training.recipe.config import DataConfig

ZSTD, NOBODYS = 32015, 60123  # a filter of hdf5plugin, and an unknown number
TOKENS = np.arange(4096, dtype=np.uint8)
RECIPE = "[run]\nsteps = 2\nglobal_batch = 2\n[model]\nlayers = 1\nhidden = 16\nheads = 1\n[data]\ncontext = 8\n"


@pytest.fixture
def without_hdf5plugin(monkeypatch):
    """Hide hdf5plugin, even if it is installed."""
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    if h5py.h5z.filter_avail(ZSTD):
        pytest.skip("zstd is available: an earlier test imported hdf5plugin, or HDF5_PLUGIN_PATH contains it")


def write_filtered(path, code, name="tokens", array=TOKENS):
    """Make a dataset with a missing filter. Its chunk holds unfiltered data."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk(array.shape)
    properties.set_filter(code, h5py.h5z.FLAG_OPTIONAL, ())  # HDF5 rejects a missing mandatory filter
    with h5py.File(path, "a") as file:
        space = h5py.h5s.create_simple(array.shape)
        kind = h5py.h5t.py_create(array.dtype)
        dataset = h5py.h5d.create(file.id, name.encode(), kind, space, properties)
        dataset.write_direct_chunk((0,) * array.ndim, array.tobytes(), 0)
    return path


@cases(
    "code, output",
    (ZSTD, f"HDF5 filter zstd ({ZSTD}), for which {sys.executable} needs the module hdf5plugin: pip install"),
    (NOBODYS, f"({NOBODYS}), but no HDF5 plugin for this filter was found; set HDF5_PLUGIN_PATH"),
)
def test_missing_filter_is_reported_when_data_is_opened(without_hdf5plugin, tmp_path, code, output):
    path = write_filtered(tmp_path / "data.h5", code)
    with pytest.raises(MissingCapabilityError) as caught:
        data_files.hdf5_tokens(path)
    start = f"an HDF5 filter is missing for data.path: {path}: dataset /tokens has the "
    assert str(caught.value).startswith(start) and output in str(caught.value)
    assert caught.value.exit_code == MISSING_CAPABILITY
    assert data_files.missing_filters(path) == [str(caught.value)]


def test_missing_filter_of_a_virtual_source_is_reported(without_hdf5plugin, tmp_path):
    source = write_filtered(tmp_path / "source.h5", ZSTD, "part")
    layout = h5py.VirtualLayout(shape=(4096,), dtype=np.uint8)
    layout[:] = h5py.VirtualSource(str(source), "part", shape=(4096,))
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_virtual_dataset("tokens", layout)
    with pytest.raises(MissingCapabilityError, match=r"source\.h5: dataset /part has the HDF5 filter zstd"):
        data_files.hdf5_tokens(tmp_path / "data.h5")


def test_unfiltered_chunks_with_a_missing_filter_are_read(without_hdf5plugin, tmp_path):
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((64,))
    properties.set_filter(ZSTD, h5py.h5z.FLAG_OPTIONAL, ())
    with h5py.File(tmp_path / "data.h5", "w") as file:
        space = h5py.h5s.create_simple((4096,))
        dataset = h5py.h5d.create(file.id, b"tokens", h5py.h5t.NATIVE_UINT8, space, properties)
        h5py.Dataset(dataset)[:] = TOKENS  # the optional filter is missing, so it is not applied
    assert np.array_equal(data_files.hdf5_tokens(tmp_path / "data.h5")[:], TOKENS)
    assert data_files.missing_filters(tmp_path / "data.h5") == []


@pytest.mark.parametrize("filters", [{}, {"compression": "gzip", "shuffle": True}, {"compression": "lzf"}])
def test_filters_of_h5py_are_supported(tmp_path, filters):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("tokens", data=TOKENS, **filters)
    assert data_files.missing_filters(tmp_path / "data.h5") == []
    assert np.array_equal(data_files.hdf5_tokens(tmp_path / "data.h5")[:], TOKENS)


def test_both_datasets_of_a_table_are_checked(without_hdf5plugin, tmp_path):
    path = write_filtered(tmp_path / "data.h5", NOBODYS, "x", np.ones((8, 4), np.float32))
    write_filtered(path, ZSTD, "y", np.ones(8, np.int64))
    first, second = data_files.missing_filters(path)
    assert "dataset /x has" in first and "dataset /y has" in second


def test_filters_of_the_staged_copy_are_checked(without_hdf5plugin, tmp_path):
    path = write_filtered(tmp_path / "data.h5", ZSTD)

    def missing_filters(**data):
        return requirements._missing_hdf5_filters(DataConfig(**data))

    assert len(missing_filters(path=str(path))) == 1
    assert len(missing_filters(path=str(path), staged=str(tmp_path / "not there yet"))) == 1
    assert "staged.h5" in missing_filters(path=str(path), staged=str(path.rename(tmp_path / "staged.h5")))[0]
    (tmp_path / "text").write_text("no HDF5")
    os.mkfifo(tmp_path / "pipe")
    for path in ("", str(tmp_path), str(tmp_path / "text"), str(tmp_path / "pipe"), str(tmp_path / "nowhere")):
        assert missing_filters(path=path) == []


def run_hpcdist(folder, *line, **environment):
    """Run hpcdist in a new process without hdf5plugin imported. In ``hidden`` there is a hdf5plugin that fails."""
    (folder / "hidden" / "hdf5plugin").mkdir(parents=True, exist_ok=True)
    (folder / "hidden" / "hdf5plugin" / "__init__.py").write_text("raise ModuleNotFoundError('no hdf5plugin')\n")
    (folder / "recipe.toml").write_text(RECIPE + "path = 'data.h5'\n")
    return jobs.hpcdist(*line, env={**os.environ, "HPCDIST_TUNING": "off", **environment}, cwd=folder)


@pytest.mark.full
def test_submit_and_training_report_a_missing_filter(tmp_path):
    write_filtered(tmp_path / "data.h5", ZSTD)
    without = {"PYTHONPATH": str(tmp_path / "hidden"), "PATH": "/usr/bin:/bin"}
    output = "data.h5: dataset /tokens has the HDF5 filter zstd (32015), for which"
    done = run_hpcdist(tmp_path, "submit", "recipe.toml", "--nodes=1", "--site=workstation", **without)
    assert (done.returncode, done.stdout) == (MISSING_CAPABILITY, "") and output in done.stderr
    dry = run_hpcdist(tmp_path, "submit", "recipe.toml", "--nodes=1", "--site=workstation", "--dry-run", **without)
    assert dry.returncode == 0 and output in dry.stderr
    assert "warning: an HDF5 filter is missing for data.path: " in dry.stderr
    trained = run_hpcdist(tmp_path, "train", "recipe.toml", "--out=run", **without)
    assert trained.returncode == MISSING_CAPABILITY and output in trained.stderr
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_job_doctor_names_file_and_filter(without_hdf5plugin, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_filtered(tmp_path / "data.h5", ZSTD)
    (tmp_path / "recipe.toml").write_text(RECIPE + "path = 'data.h5'\n")
    (tmp_path / "job.toml").write_text(recipes.dump(recipes.load(tmp_path / "recipe.toml", [], {}).recipe))
    result = job._packages(tmp_path / "job.toml")
    assert result.status == mpi_library.FAIL and "data.h5: dataset /tokens has the HDF5 filter zstd" in result.found


def test_broken_hdf5plugin_is_reported(without_hdf5plugin, tmp_path, monkeypatch):
    (tmp_path / "hdf5plugin.py").write_text("raise RuntimeError('made for another HDF5')\n")
    monkeypatch.delitem(sys.modules, "hdf5plugin")
    monkeypatch.syspath_prepend(tmp_path)
    with h5py.File(write_filtered(tmp_path / "data.h5", ZSTD)) as file, pytest.raises(MissingCapabilityError) as caught:
        files.storage_of(file["tokens"])
    assert "module hdf5plugin: it is installed, but cannot be imported: made for another HDF5" in str(caught.value)


@pytest.mark.full
def test_filter_works_with_hdf5plugin(tmp_path):
    if importlib.util.find_spec("hdf5plugin") is None:
        pytest.skip("there is no hdf5plugin")
    program = (
        "import sys, h5py, hdf5plugin, numpy as np\n"
        "h5py.File(sys.argv[1], 'w').create_dataset('tokens', data=np.arange(4096, dtype=np.uint8), "
        "**hdf5plugin.Zstd())\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "data.h5")], check=True, timeout=LIMIT_S)
    done = run_hpcdist(tmp_path, "submit", "recipe.toml", "--nodes=1", "--site=workstation", "--dry-run")
    assert done.returncode == 0 and "hdf5plugin" not in done.stderr
    trained = run_hpcdist(tmp_path, "train", "recipe.toml", "--out=run")
    assert trained.returncode == 0, trained.stderr
