"""The directory of compiled kernels: where it cannot be written, a node compiles once, and not each of its ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.jobs import LIMIT_S
from hpcdist.arrays import jit
from hpcdist.errors import MissingCapabilityError


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(jit.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(jit, "_prepared", None)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    return tmp_path / f"hpcdist-numba-{os.getuid()}" / jit._digest_of_sources()


def read_only(monkeypatch, *folders):
    """Let no file be made in ``folders``, also by root."""
    make = jit.tempfile.TemporaryFile

    def refuse(**options):
        if any(folder in (options["dir"], *options["dir"].parents) for folder in folders):
            raise OSError(30, os.strerror(30))
        return make(**options)

    monkeypatch.setattr(jit.tempfile, "TemporaryFile", refuse)


def test_a_directory_that_can_be_written_is_taken_in_silence(tmp_path, temporary, monkeypatch, capfd):
    assert jit.prepare_cache() and os.environ["NUMBA_CACHE_DIR"] == str(temporary)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "chosen"))
    assert jit.prepare_cache() and Path(os.environ["NUMBA_CACHE_DIR"]).parent == tmp_path / "chosen"
    assert capfd.readouterr().err == ""


def test_one_that_cannot_is_told_once_for_a_node_and_what_it_has_is_copied(tmp_path, temporary, monkeypatch, capfd):
    chosen = tmp_path / "chosen"
    (chosen / temporary.name / "gpt_0").mkdir(parents=True)
    (chosen / temporary.name / "gpt_0" / "kernel.nbi").write_bytes(b"code")
    read_only(monkeypatch, chosen)
    for process in range(2):
        monkeypatch.setattr(jit, "_prepared", None)
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(chosen))
        assert jit.prepare_cache() and os.environ["NUMBA_CACHE_DIR"] == str(temporary)
        told = capfd.readouterr().err
        assert told.count("\n") == (process == 0) and ("Read-only file system" in told) == (process == 0)
    assert (temporary / "gpt_0" / "kernel.nbi").read_bytes() == b"code"
    assert temporary.parent.stat().st_mode & 0o777 == 0o700


def test_without_any_that_can_be_written_nothing_is_kept_and_that_is_told(tmp_path, monkeypatch, capfd):
    read_only(monkeypatch, Path("/"))
    assert not jit.prepare_cache()
    assert "each process compiles its kernels anew" in capfd.readouterr().err


def test_a_directory_of_others_is_refused(tmp_path, temporary):
    temporary.parent.mkdir()
    temporary.parent.chmod(0o777)
    with pytest.raises(MissingCapabilityError, match="not a private directory"):
        jit.prepare_cache()


COMPILES = """
import sys
import numpy as np
from hpcdist.optim.update.kernels import add_squares
print("ready", flush=True)
sys.stdin.readline()
add_squares(np.ones(8, sys.argv[1]), np.zeros(16), 0)
print(add_squares.compiled.stats.cache_misses.total())
"""


def test_of_processes_that_need_a_kernel_at_once_one_compiles_it(tmp_path):
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
    assert sum(misses) == 2, "one of each type"
    for dtype in ("float32", "float64"):
        line = [sys.executable, "-c", COMPILES, dtype]
        done = subprocess.run(
            line, env=environment, input="\n", capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
        assert done.stdout == "ready\n0\n", "what one has kept the other has not overwritten"
