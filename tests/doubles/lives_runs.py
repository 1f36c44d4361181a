"""Jobs of ranks that are threads and die of chaos, and the losses that they leave behind."""

from pathlib import Path
from typing import Any

from hpcdist.checkpoint.lock import RunLock
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.placement import locate
from hpcdist.comm.start import Session
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.comm.threads.group import RankDeath
from hpcdist.telemetry.metrics import step_metrics
from hpcdist.training import run_directory
from hpcdist.training.build.state_source import CheckpointSource
from hpcdist.training.chaos import injection
from hpcdist.training.elastic.job import ElasticJob
from hpcdist.training.elastic.membership import Membership
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.job import TrainingJob
from hpcdist.training.run.stop_requests import StopRequests

LIMIT_S = 60.0


class Quiet(Session):
    """A session of threads: no recorder, no watchdog, no process that could leave."""

    def record(self, directory: Path, deadline_s: float, *, spans: bool = False) -> None:
        """Record nothing."""

    def stop_recording(self) -> None:
        """There is none."""

    def survive(self, comm: Communicator) -> Session:
        """Return the session of those who train."""
        return Quiet(comm, locate(comm, None), "threads", self.abort)

    def leave(self, code: int) -> None:
        """A thread just ends."""


def abort(code: int) -> None:
    """End a run as fail-fast would."""
    raise SystemExit(code)


def recipe_of(path: Path, keys: dict[str, Any]) -> recipes.Recipe:
    """Return a small recipe on the text in ``path``, with ``keys`` changed (local)."""
    settings = {
        "model.layers": 1,
        "model.hidden": 16,
        "model.heads": 2,
        "data.path": path,
        "data.context": 8,
        "run.steps": 10,
        "run.global_batch": 12,
        "run.validation_samples": 12,
        "energy.sources": "none",
        **keys,
    }
    return recipes.load(None, [f"{key}={value}" for key, value in settings.items()], {}).recipe


def survive(
    size: int,
    out: Path,
    path: Path,
    keys: dict[str, Any],
    spares: int = 0,
    ranks_per_node: int | None = None,
    resume: str = "never",
) -> step_metrics.MetricsData:
    """Train on ``size`` threads, of which chaos may kill some; return the metrics that the living have written."""
    recipe = recipe_of(path, keys)
    mode = "replace" if spares else "shrink"

    def body(comm: Communicator) -> int:
        session = Quiet(comm, locate(comm, None), "threads", abort)
        lock = RunLock({})
        run = run_directory.prepare_run_directory(comm, recipe, out, resume, lock)
        team = Membership.begin(comm, mode, spares)
        job = TrainingJob(
            recipe, run, StopRequests(), lock, as_json=False, holder=lock.identity
        )  # threads are one process
        return ElasticJob(job, session, team).train(
            None if run.resume_from is None else CheckpointSource(run.resume_from)
        )

    before, injection.kill_process = injection.kill_process, _die
    try:
        codes = run_threads(size + spares, body, deadline_s=LIMIT_S, fault_tolerant=True, ranks_per_node=ranks_per_node)
    finally:
        injection.kill_process = before
    assert {code for code in codes if code is not None} == {0}
    return step_metrics.read(out / "metrics.h5")


def _die() -> None:
    raise RankDeath
