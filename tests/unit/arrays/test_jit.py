"""The directory of compiled kernels: if it is not writable, a node compiles once and not once per rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.jobs import LIMIT_S
from hpcdist.arrays import jit
from hpcdist.errors import MissingCapabilityError


@pytest.fixture(autouse=True)
def fallback_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(jit.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(jit, "_prepared", None)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    return tmp_path / f"hpcdist-numba-{os.getuid()}" / jit._digest_of_sources()


def make_read_only(monkeypatch, *folders):
    """Make file creation in ``folders`` fail, also for root."""
    make = jit.tempfile.TemporaryFile

    def raise_read_only(**options):
        if any(folder in (options["dir"], *options["dir"].parents) for folder in folders):
            raise OSError(30, os.strerror(30))
        return make(**options)

    monkeypatch.setattr(jit.tempfile, "TemporaryFile", raise_read_only)


def test_writable_cache_directory_is_used_without_warning(tmp_path, fallback_directory, monkeypatch, capfd):
    assert jit.prepare_cache() and os.environ["NUMBA_CACHE_DIR"] == str(fallback_directory)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "chosen"))
    assert jit.prepare_cache() and Path(os.environ["NUMBA_CACHE_DIR"]).parent == tmp_path / "chosen"
    assert capfd.readouterr().err == ""


def test_read_only_cache_is_copied_with_one_warning_per_node(tmp_path, fallback_directory, monkeypatch, capfd):
    chosen = tmp_path / "chosen"
    (chosen / fallback_directory.name / "gpt_0").mkdir(parents=True)
    (chosen / fallback_directory.name / "gpt_0" / "kernel.nbi").write_bytes(b"code")
    make_read_only(monkeypatch, chosen)
    for process in range(2):
        monkeypatch.setattr(jit, "_prepared", None)
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(chosen))
        assert jit.prepare_cache() and os.environ["NUMBA_CACHE_DIR"] == str(fallback_directory)
        stderr = capfd.readouterr().err
        assert stderr.count("\n") == (process == 0) and ("Read-only file system" in stderr) == (process == 0)
    assert (fallback_directory / "gpt_0" / "kernel.nbi").read_bytes() == b"code"
    assert fallback_directory.parent.stat().st_mode & 0o777 == 0o700


def test_warning_if_no_cache_directory_is_writable(tmp_path, monkeypatch, capfd):
    make_read_only(monkeypatch, Path("/"))
    assert not jit.prepare_cache()
    assert "each process compiles its kernels anew" in capfd.readouterr().err


def test_cache_directory_open_to_other_users_is_rejected(tmp_path, fallback_directory):
    fallback_directory.parent.mkdir()
    fallback_directory.parent.chmod(0o777)
    with pytest.raises(MissingCapabilityError, match="must be accessible only to this user"):
        jit.prepare_cache()


COMPILES = """
import sys
import numpy as np
from hpcdist.optim.kernels import add_squares
print("ready", flush=True)
sys.stdin.readline()
add_squares(np.ones(8, sys.argv[1]), np.zeros(16), 0)
print(add_squares.compiled.stats.cache_misses.total())
"""


def test_concurrent_processes_compile_a_kernel_once(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", COMPILES, dtype],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for dtype in ("float32", "float64", "float32", "float64")
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    misses = [int(process.communicate(timeout=LIMIT_S)[0]) for process in processes]
    assert sum(misses) == 2, "one compilation per type"
    for dtype in ("float32", "float64"):
        line = [sys.executable, "-c", COMPILES, dtype]
        done = subprocess.run(
            line, env=environment, input="\n", capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
        assert done.stdout == "ready\n0\n", "a process has overwritten a kernel that another has kept"
