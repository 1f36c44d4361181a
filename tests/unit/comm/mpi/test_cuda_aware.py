"""Device pointers are probed in child processes that may crash: rounds, outcomes, the cache, and a real probe."""

import json
import math
import os
import signal
import stat
import sys
from types import SimpleNamespace

import pytest

from hpcdist.arrays.gpu import device
from hpcdist.comm.handover import OPERATIONS
from hpcdist.comm.launch.environment import LaunchEnvironment
from hpcdist.comm.mpi import cuda_aware
from hpcdist.comm.mpi.cuda_aware import DevicePointerSupport, ProbeOutcome
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError, MissingCapabilityError


class Children:
    """Stand-ins for the child processes. Each reports the operations that passed before the first deadly operation."""

    def __init__(self, deadly, notes=(), starts=True):
        self.deadly, self.notes, self.starts = deadly, list(notes), starts
        self.runs = []
        self.limits_s = []
        self.library = "Some MPI 1.0"

    def __call__(self, words, environment, limit_s):
        if "-c" in words:
            return ProbeOutcome((self.library,), "") if self.library else ProbeOutcome((), "exit code 1: no MPI")
        self.limits_s.append(limit_s)
        ranks = 1 if words[0] == sys.executable else 2
        operations = list(words[words.index(cuda_aware.MODULE) + 1 :])
        self.runs.append((ranks, operations))
        if ranks == 2 and not self.starts:
            return ProbeOutcome((), "exit code 1: no slots")
        lines = [json.dumps({"ready": ranks, "notes": [*self.notes, *(["two"] if ranks == 2 else [])]})]
        for name in operations:
            end = self.deadly.get(ranks, {}).get(name)
            if end == "wrong":
                lines.append(json.dumps({"failed": name, "why": "wrong data arrived"}))
            elif end:
                return ProbeOutcome(tuple(lines), end)
            else:
                lines.append(json.dumps({"passed": name}))
        return ProbeOutcome(tuple(lines), "")


@pytest.fixture(autouse=True)
def isolated_probe(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cuda_aware, "_two_rank_launch", lambda environment: (["mpirun", "-n", "2"], {}))


def test_working_operations_pass_in_both_rounds():
    children = Children({})
    verdict = cuda_aware.probe({}, "cpu", children)
    assert verdict == DevicePointerSupport(frozenset(OPERATIONS), "tried between two ranks")
    assert children.runs == [(1, list(OPERATIONS)), (2, list(OPERATIONS))]


def test_operation_that_crashes_alone_is_not_tried_with_two_ranks():
    children = Children({1: dict.fromkeys(OPERATIONS, "SIGSEGV")})
    assert cuda_aware.probe({}, "cpu", children) == DevicePointerSupport(frozenset(), "in a world of one: SIGSEGV")
    assert all(ranks == 1 for ranks, _ in children.runs)
    assert [operations[0] for _, operations in children.runs] == list(OPERATIONS)  # a new child after each death


def test_each_operation_is_judged_separately():
    children = Children({1: {"all_gather": "SIGSEGV"}, 2: {"allreduce": "no end within 60 s", "broadcast": "wrong"}})
    verdict = cuda_aware.probe({}, "cpu", children)
    assert verdict.operations == {"send", "reduce_scatter", "all_to_all"}
    for part in ("allreduce: no end within 60 s", "broadcast: wrong data arrived", "all_gather: SIGSEGV"):
        assert part in verdict.reason


@pytest.mark.parametrize(("notes", "allowed"), [(["cuda"], {"send"}), ([], set())])
def test_single_rank_probe_needs_confirmation_by_the_library(notes, allowed):
    verdict = cuda_aware.probe({}, "cpu", Children({}, notes, starts=False))
    assert verdict.operations == allowed and "two ranks could not be tried (exit code 1: no slots)" in verdict.reason


def test_missing_mpirun_allows_no_operation(monkeypatch):
    monkeypatch.setattr(cuda_aware, "_two_rank_launch", lambda environment: None)
    verdict = cuda_aware.probe({}, "cpu", Children({}))
    assert not verdict.operations and "no mpirun was found" in verdict.reason


def test_environment_setting_prevents_a_probe(monkeypatch):
    def forbidden(environment, **_):
        raise AssertionError("a probe was started")

    monkeypatch.setattr(cuda_aware, "probe_cached", forbidden)
    two = LaunchEnvironment("mpirun", 2, 0, 0)
    yes, no = (cuda_aware.detect(two, {cuda_aware.VARIABLE: output}) for output in ("yes", "no"))
    assert yes is not None and yes.operations == set(OPERATIONS)
    assert no is not None and no.operations == set()
    with pytest.raises(ConfigurationError, match="HPCDIST_CUDA_AWARE=maybe; choose one of "):
        cuda_aware.detect(two, {cuda_aware.VARIABLE: "maybe"})
    assert cuda_aware.detect(LaunchEnvironment("mpirun", 2, 1, 1), {}) is None  # the first rank of the node probes
    alone = cuda_aware.detect(None, {})
    assert alone is not None and not alone.operations
    with pytest.raises(AssertionError, match="a probe was started"):
        cuda_aware.detect(two, {})


def test_only_operations_supported_by_all_nodes_are_used():
    messages = [
        DevicePointerSupport(frozenset({"send", "allreduce"}), "one"),
        None,
        DevicePointerSupport(frozenset({"send"}), "two"),
        None,
    ]
    for verdict in run_threads(4, lambda comm: cuda_aware.agree(comm, messages[comm.rank])):
        assert verdict == DevicePointerSupport(frozenset({"send"}), "two")
    for verdict in run_threads(2, lambda comm: cuda_aware.agree(comm, None)):
        assert verdict.operations == frozenset()


def test_children_inherit_library_settings_but_not_the_world():
    job = dict.fromkeys(("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_JOB_ID", "HYDI_CONTROL_FD"), "1")
    kept = dict.fromkeys(("PATH", "OMPI_MCA_pml", "UCX_TLS", "MPICH_GPU_SUPPORT_ENABLED", "CUDA_VISIBLE_DEVICES"), "1")
    assert cuda_aware.stripped(job | kept) == kept


def test_dead_or_hanging_child_gives_an_outcome():
    def child(code):
        return cuda_aware._run([sys.executable, "-c", f"print('{{}}', flush=True)\n{code}"], os.environ, 1.0)

    assert child(f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})") == ProbeOutcome(("{}",), "SIGSEGV")
    assert child("import time; time.sleep(60)").end == "no end within 1 s"
    assert child("raise SystemExit('reason')").end == "exit code 1: reason"
    assert child("").end == ""
    cut_off = child("import os; os.write(1, b'in the middle of a letter: ' + 'ü'.encode()[:1]); os._exit(0)")
    assert cut_off.lines[1].startswith("in the middle") and cut_off.end == ""


def test_truncated_line_is_ignored():
    def run(words, environment, limit_s):
        whole = [json.dumps(row) for row in ({"ready": 1, "notes": []}, {"passed": "send"}, {"passed": "broadcast"})]
        ended = words[words.index(cuda_aware.MODULE) + 1 :] != list(OPERATIONS)
        return ProbeOutcome((whole[0], "[1]", "7") if ended else (*whole[:2], whole[2][:-3]), "SIGSEGV")

    passed, failures, _ = cuda_aware._try(run, [], {}, OPERATIONS, math.inf)
    assert passed == ["send"] and failures == dict.fromkeys(OPERATIONS[1:], "SIGSEGV")


def test_all_children_share_one_time_budget(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(cuda_aware, "time", SimpleNamespace(monotonic=lambda: now))
    children = Children({2: dict.fromkeys(OPERATIONS[1:], "no end")})

    def slow(words, environment, limit_s):
        nonlocal now
        outcome = children(words, environment, limit_s)
        now += min(50.0, limit_s)
        return outcome

    verdict = cuda_aware.probe({}, "cpu", slow)
    assert children.limits_s == [60.0, 60.0, 20.0]
    assert verdict.operations == {"send"}
    tried, untried = (f"{OPERATIONS[2]}: no end", f"{OPERATIONS[3]}: not tried, 120 s were spent")
    assert tried in verdict.reason and untried in verdict.reason
    assert cuda_aware.probe({}, "cpu", children, ends_at=now) == DevicePointerSupport(
        frozenset(), "in a world of one: not tried, 120 s were spent"
    )


def test_result_is_cached_per_library_gpus_and_settings(gpu, monkeypatch, tmp_path):
    def cached_probe(children, environment=os.environ, renewed=False):
        return cuda_aware.probe_cached(environment, renewed, children)

    first, second, third, fourth = (Children({2: {"allreduce": "SIGSEGV"}}) for _ in range(4))
    before, after = cached_probe(first), cached_probe(second)
    assert before.operations == after.operations == set(OPERATIONS) - {"allreduce"}
    assert first.runs and not second.runs
    (file,) = (tmp_path / "hpcdist" / "device_pointers").iterdir()
    assert "allreduce: SIGSEGV; measured on 2" in after.reason and f"cached in {file}" in after.reason
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    cached_probe(third, renewed=True)
    assert third.runs, "a renewal was requested"
    cached_probe(fourth, {**os.environ, "UCX_TLS": "tcp"})
    assert fourth.runs, "another setting needs another probe"
    cached_probe(fourth, {**os.environ, "PMIX_RANK": "1"})
    other = Children({})
    other.library = "Some MPI 2.0"
    assert cached_probe(other).operations == set(OPERATIONS)
    runtime = device.cupy().cuda.runtime
    for name, value in (("driverGetVersion", lambda: 7), ("getDeviceProperties", lambda index: {"name": b"other"})):
        with monkeypatch.context() as changed:
            changed.setattr(runtime, name, staticmethod(value))
            fresh = Children({})
            cached_probe(fresh)
            assert fresh.runs, name
    assert len(list(file.parent.iterdir())) == 5


@pytest.mark.parametrize("spoil", ["others", "cut", "operation", "key", "list"])
def test_untrusted_cached_result_is_probed_again(gpu, spoil, tmp_path):
    cuda_aware.probe_cached(run=Children({1: dict.fromkeys(OPERATIONS, "SIGSEGV")}))
    (file,) = (tmp_path / "hpcdist" / "device_pointers").iterdir()
    content = json.loads(file.read_text())
    content |= {"operations": list(OPERATIONS)}
    if spoil == "operation":
        content["operations"].append("everything")
    if spoil == "key":
        content["key"]["driver"] += 1
    text = json.dumps(content)
    file.write_text({"cut": text[:-9], "list": "[]"}.get(spoil, text))
    file.chmod(0o622 if spoil == "others" else 0o600)
    children = Children({1: {"send": "SIGBUS"}})
    assert cuda_aware.probe_cached(run=children).operations == set(OPERATIONS) - {"send"}
    assert children.runs
    assert json.loads(file.read_text())["operations"] == sorted(set(OPERATIONS) - {"send"})


def test_uncacheable_result_is_probed_each_time(gpu, monkeypatch, tmp_path):
    nameless = Children({})
    nameless.library = ""
    assert cuda_aware.probe_cached(run=nameless) == DevicePointerSupport(
        frozenset(OPERATIONS), "tried between two ranks"
    )
    assert not (tmp_path / "hpcdist").exists()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    verdict = cuda_aware.probe_cached(run=Children({}))
    assert verdict.operations == set(OPERATIONS) and "; not cached: " in verdict.reason


def test_library_version_is_read_in_a_child():
    pytest.importorskip("mpi4py")
    output = cuda_aware._run([sys.executable, "-P", "-c", cuda_aware._ASK], cuda_aware.stripped(os.environ), 60.0)
    assert output.end == "" and len(output.lines) == 1 and "MPI" in output.lines[0]


@pytest.mark.full
def test_real_probe_accepts_host_memory(monkeypatch):
    """MPI accepts host pointers in every operation, and the probe must report that."""
    pytest.importorskip("mpi4py")
    monkeypatch.undo()
    try:
        cuda_aware.mpirun.find()
    except MissingCapabilityError as error:
        pytest.skip(str(error))
    verdict = cuda_aware.probe(on="cpu")
    assert verdict.operations == set(OPERATIONS), verdict.reason
