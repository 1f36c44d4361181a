"""Ranks that run one suite together and agree on each verdict, so that no rank is left waiting for another.


Every rank runs every test. After each phase of a test (setup, call, teardown) the ranks exchange their verdicts. If one
rank failed, all ranks fail, with the names and messages of the failed ranks. Only rank 0 reports.

If a rank failed while the others wait for it in the test, it prints the reason and ends the job.

Outside mpiexec the suite runs on the communicator of one process.
"""

import faulthandler
import os
import pickle
import time
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

from hpcdist.comm import start
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.launch import environment
from hpcdist.comm.threads import communicator

PATIENCE_S = float(os.environ.get("HPCDIST_TEST_PATIENCE_S", "30"))  # a failed rank waits so long for the others
LIMIT_S = float(os.environ.get("HPCDIST_TEST_LIMIT_S", "240"))  # of one test; then all stacks are dumped
VERDICT_BYTES = 16384
DRAIN_S = 1.0  # for the launcher to pass on the last words: an abort may overtake them

# Examples drawn by each rank on its own would differ.
hypothesis.settings.register_profile("ranks", deadline=None, derandomize=True, database=None)


@dataclass
class Verdict:
    """The outcome of one phase of a test on one rank."""

    test: str
    phase: str
    outcome: str
    text: str

    def packed(self) -> np.ndarray:
        """Return the verdict as ``VERDICT_BYTES`` bytes. A text that is too long is cut at the front."""
        raw = pickle.dumps((self.test, self.phase, self.outcome, self.text[-VERDICT_BYTES // 4 :]))
        return np.frombuffer(raw.ljust(VERDICT_BYTES, b"\0"), np.uint8).copy()


class Agreement:
    """The exchange of verdicts over a separate communicator."""

    def __init__(self, world: Communicator, abort: Any) -> None:
        self.world = world
        self._comm = world.dup("verdicts")
        self._abort = abort

    def exchange(self, local_data: Verdict) -> list[Verdict]:
        """Return the verdicts of all ranks in rank order.

        Collective. A failed rank ends the job if the others do not come.
        """
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        sent, received = local_data.packed(), {rank: np.zeros(VERDICT_BYTES, np.uint8) for rank in others}
        requests = [self._comm.irecv(received[rank], rank) for rank in others]
        requests += [self._comm.isend(sent, rank) for rank in others]
        self._wait(requests, local_data)
        verdicts = {rank: Verdict(*pickle.loads(buffer.tobytes())) for rank, buffer in received.items()}
        return [verdicts.get(rank, local_data) for rank in range(self._comm.size)]

    def _wait(self, requests: list[Any], local_data: Verdict) -> None:
        began, pause = time.monotonic(), 1e-5
        while not all(request.test() for request in requests):
            if local_data.outcome == "failed" and time.monotonic() - began > PATIENCE_S:
                self._give_up(local_data)
            time.sleep(pause)  # the ranks share the cores with ranks that still compute
            pause = min(2 * pause, 2e-3)

    def _give_up(self, local_data: Verdict) -> None:
        os.write(
            _stderr,
            f"\n[rank {self.world.rank}] {local_data.test} failed in {local_data.phase}, and after {PATIENCE_S:g} s "
            f"the other ranks have not come to agree (they wait in the test?):\n{local_data.text}\n".encode(),
        )
        time.sleep(DRAIN_S)
        self._abort(1)


_agreement: Agreement | None = None
_seed = 0
_stderr = 2  # where pytest does not capture


def pytest_configure(config: pytest.Config) -> None:
    global _agreement, _seed, _stderr
    _stderr = os.dup(2)
    if environment.launch_environment() is None:
        _agreement = Agreement(communicator.solo(), os._exit)
    else:
        hypothesis.settings.load_profile("ranks")
        session = start.start()
        _agreement = Agreement(session.comm, session.abort)
    _seed = _world().broadcast_object(int(os.environ["HPCDIST_TEST_SEED"]))  # tests/conftest.py has set it


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if _world().rank > 0:  # its failures reach rank 0 in the verdicts
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115 (as long as the session)


def _world() -> Communicator:
    assert _agreement is not None
    return _agreement.world


def pytest_report_header(config: pytest.Config) -> str:
    return f"ranks: {_world().size}, HPCDIST_TEST_SEED={_seed}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    if _world().size > 1:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=_stderr)
    try:
        return (yield)
    finally:
        if _world().size > 1:
            faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Generator[None, Any, Any]:
    report: pytest.TestReport = yield
    assert _agreement is not None
    local_data = Verdict(item.nodeid, report.when or "", report.outcome, report.longreprtext)
    complaint = disagreement(_agreement.exchange(local_data))
    if complaint is not None:
        report.outcome = "failed"
        report.longrepr = complaint
    return report


def disagreement(verdicts: list[Verdict]) -> str | None:
    """Return the reason for a failure of the phase on any rank, or None if all ranks passed."""
    if len({(verdict.test, verdict.phase) for verdict in verdicts}) > 1:
        return f"the ranks are not in the same test: {[(verdict.test, verdict.phase) for verdict in verdicts]}"
    failed = [rank for rank, verdict in enumerate(verdicts) if verdict.outcome == "failed"]
    if failed:
        texts = [f"---- rank {rank} ----\n{verdicts[rank].text}" for rank in failed]
        return f"failed on rank {', '.join(map(str, failed))} of {len(verdicts)}\n" + "\n".join(texts)
    outcomes = [verdict.outcome for verdict in verdicts]
    return f"the ranks disagree: {outcomes}" if len(set(outcomes)) > 1 else None


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A separate generator for each test, with the same state on every rank: draw the inputs of all ranks, use one."""
    print(f"repeat with HPCDIST_TEST_SEED={_seed}")
    return np.random.Generator(np.random.Philox(key=[_seed, zlib.crc32(request.node.nodeid.encode())]))


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    """The world as a separate communicator for each test: messages left by a failed test cannot reach the next."""
    local_data = _world().dup(request.node.name)
    yield local_data
    if not request.session.testsfailed:
        local_data.free()


@pytest.fixture
def folder(comm: Communicator, tmp_path: Path) -> Path:
    """A directory that all ranks see, with a text of random words. The text is the same for all tests of a run."""
    shared = Path(comm.broadcast_object(str(tmp_path)))
    if comm.rank == 0:
        drawn = np.random.default_rng(_seed)
        words = ["".join(drawn.choice(list("abcdefgh"), 4)) for _ in range(30)]
        (shared / "text.txt").write_text(" ".join(drawn.choice(words, 3000)))
    comm.barrier()
    return shared
