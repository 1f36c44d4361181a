"""Inject stragglers and faults into a run.

A straggler sleeps after each operation, so that the exchange sees the delays of a slower processor; the numbers do not
change. A fault first creates a marker file in the run directory, so that a repeated step does not repeat the fault.
"""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from hpcdist.arrays import backend, rng
from hpcdist.arrays.backend import Array
from hpcdist.checkpoint.two_phase import group_of
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigurationError, StorageError
from hpcdist.hdf5.overlay import Overlay
from hpcdist.strategies.core.exchange import Exchange
from hpcdist.strategies.core.operations import COMPUTE, EXCHANGED, Kind, Operation
from hpcdist.strategies.schedule.step import Handler, RunningStep, StepObserver
from hpcdist.training.recipe.chaos_config import ChaosConfig, ChaosFault

SLOWDOWN_STREAM: Final = 0x6368616F73  # key of the random stream of slow steps
SLEEP_SLICE_S: Final = 1e-3  # a sleeping rank that serves other ranks polls for requests at this interval


def is_slow(config: ChaosConfig, rank: int, step: int) -> bool:
    """Return True if ``rank`` must act as a straggler in ``step``, according to ``config``. Local."""
    if rank not in config.slow_ranks:
        return False
    return bool(rng.stream(config.seed, SLOWDOWN_STREAM, rank, step).random() < config.slow_probability)


class SlowdownTimer:
    """Calculator of the time that a straggler rank sleeps after each compute operation."""

    # Compute and sleep together take ``factor`` times the compute time, but at least ``factor * least_s`` seconds.
    def __init__(self, count: int, least_s: float, factor: float) -> None:
        self._count, self._least_s, self._factor = count, least_s, factor
        self._done, self._computed_s, self._taken_s = 0, 0.0, 0.0

    def lacking_s(self, computed_s: float) -> float:
        """Return the number of seconds to sleep after a compute operation that took ``computed_s`` seconds."""
        self._done += 1
        self._computed_s += computed_s
        due_s = self._factor * max(self._computed_s, self._least_s * self._done / self._count)
        return max(0.0, due_s - self._taken_s - computed_s)

    def took(self, seconds: float) -> None:
        """Record that the last operation and the sleep after it together took ``seconds``."""
        self._taken_s += seconds


class Slowdown(StepObserver):
    """Step observer that sleeps after the forward and backward passes of a straggler rank."""

    # On a replica with more samples, ``config.step_s`` is scaled up.
    def __init__(self, config: ChaosConfig, rank: int, even_samples: float, exchange: Exchange) -> None:
        self._config, self._rank, self._even_samples, self._exchange = config, rank, even_samples, exchange
        self._pace: SlowdownTimer | None = None  # None outside of steps: evaluations are not slowed down

    def around(self, kind: Kind, handler: Handler) -> Handler:
        return partial(self._paced, handler) if kind in COMPUTE else handler

    def begin_step(self, number: int, operations: Sequence[Operation], sizes: Sequence[int]) -> None:
        count = sum(operation.kind in (Kind.FORWARD, Kind.BACKWARD) for operation in operations)
        factor = self._config.slow_factor if is_slow(self._config, self._rank, number) else 1.0
        self._pace = SlowdownTimer(count, self._config.step_s * sum(sizes) / self._even_samples, factor)

    def leave_step(self) -> None:
        self._pace = None

    def _paced(self, compute: Handler, op: Operation) -> None:
        start = time.perf_counter()
        compute(op)
        if self._pace is None:
            return
        backend.synchronise(self._exchange.parameters.array)  # include the GPU's execution in the time
        self._sleep(self._pace.lacking_s(time.perf_counter() - start))
        self._pace.took(time.perf_counter() - start)

    def _sleep(self, seconds: float) -> None:
        exchange = self._exchange
        end = time.perf_counter() + seconds
        while (remaining := end - time.perf_counter()) > 0:
            time.sleep(min(remaining, SLEEP_SLICE_S) if exchange.traits.serves else remaining)
            if exchange.traits.serves:
                exchange.handlers[Kind.COLLECT](Operation(Kind.COLLECT))


DISK_ERRNO: Final = {"fail": errno.EIO, "full": errno.ENOSPC, "fsync": errno.EIO}


class FailingFile(Overlay):
    """New file at ``path`` whose write or fsync fails, to test the handling of I/O errors.

    ``how``: type of the failure: "fail", "full" or "kill" in a write, or "fsync". ``strikes``: function that returns
    True if the failure must happen now. For "kill", ``strikes`` ends the process after half of the data is written.
    """

    def __init__(self, path: Path, how: str, strikes: Callable[[], bool]) -> None:
        super().__init__(path, create=True)
        self._how, self._strikes = how, strikes

    def pwrite(self, data: memoryview, offset: int) -> None:
        """Write ``data`` at byte ``offset``. The write that crosses the middle of the file can fail."""
        middle = os.fstat(self._fd).st_size // 2
        if self._how != "fsync" and offset + data.nbytes > middle:
            if self._how != "fail":
                super().pwrite(data[: max(0, middle - offset)], offset)
            self._strike()
        super().pwrite(data, offset)

    def fsync(self) -> None:
        self._strike()
        super().fsync()

    def _strike(self) -> None:
        if self._strikes():
            number = DISK_ERRNO[self._how]
            raise OSError(number, os.strerror(number))


MARKER_DIRECTORY: Final = "chaos"  # in the run directory
MANTISSA_BITS: Final = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}
GRADIENT_EXCHANGES: Final = (*EXCHANGED, Kind.COLLECT)  # operations that send or receive gradients
END_OF_STEP: Final = "end"


def kill_process() -> None:
    """Kill this process with SIGKILL, without a flush or a message to other ranks, as if its node had failed."""
    os.kill(os.getpid(), signal.SIGKILL)


class FaultPlan:
    """Faults in recipe section [chaos] for ``rank``. The run directory ``directory`` records the injected faults."""

    def __init__(self, config: ChaosConfig, rank: int, directory: Path) -> None:
        self._own = [fault for fault in config.faults if fault.rank == rank]
        self._directory = directory / MARKER_DIRECTORY

    def of_step(self, step: int) -> list[ChaosFault]:
        """Return a list of the faults to inject in ``step``, except faults in checkpoint writes."""
        return [fault for fault in self._own if fault.step == step and not fault.in_save]

    def strikes(self, fault: ChaosFault) -> bool:
        """Return True only at the first call for ``fault`` in the run directory. Restarts do not repeat the fault."""
        # O_EXCL makes the marker decide, also for a start that repeats the step after a kill.
        try:
            self._directory.mkdir(exist_ok=True)
            os.close(os.open(self._directory / fault.name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            return False
        except OSError as error:
            raise StorageError(
                f"the marker file {self._directory / fault.name} cannot be created: {error.strerror}"
            ) from error
        print(f"hpcdist: chaos: {fault.described()}", file=sys.stderr, flush=True)
        return True

    def opens(self, step: int) -> Callable[[Path], Overlay]:
        """Return the function that creates checkpoint files after ``step``: `FailingFile` objects if a fault is due."""
        for fault in self._own:
            if fault.in_save and fault.step <= step and not (self._directory / fault.name).exists():
                how = fault.how if fault.kind == "disk" else fault.kind
                return partial(FailingFile, how=how, strikes=partial(self._in_save, fault))
        return Overlay.created

    def _in_save(self, fault: ChaosFault) -> bool:
        happens = self.strikes(fault)
        if happens and fault.kind == "kill":
            kill_process()
        return happens


class FaultInjector(StepObserver):
    """Step observer that injects the faults of this rank. A recomputed step does not repeat them."""

    def __init__(self, faults: FaultPlan, exchange: Exchange) -> None:
        self._faults, self._exchange = faults, exchange
        self._due: list[ChaosFault] = []  # in the current step
        self._agreed = False

    def around(self, kind: Kind, handler: Handler) -> Handler:
        return partial(self._around, handler)

    def begin_step(self, number: int, operations: Sequence[Operation], sizes: Sequence[int]) -> None:
        self._due, self._agreed = self._faults.of_step(number), False
        self._meet("begin")

    def complete_step(self, step: RunningStep, sums: np.ndarray) -> None:
        self._meet(END_OF_STEP)

    def leave_step(self) -> None:
        self._due = []

    def exchanges(self, step: RunningStep, op: Operation) -> None:
        due = [fault for fault in self._due if fault.how == "gradients" or fault.kind == "overflow"]
        values = step.gradients_in(op.range) if due and op.range is not None else None
        if values is not None and values.size:
            for fault in due:
                self._due.remove(fault)
                if self._faults.strikes(fault):
                    (flip_bit if fault.kind == "corrupt" else make_infinite)(values)

    def _around(self, handler: Handler, op: Operation) -> None:
        if self._due and op.kind in GRADIENT_EXCHANGES:
            self._meet("exchange")
        handler(op)
        if not self._due:
            return
        if op.kind is Kind.FORWARD:
            self._meet("forward")
        elif op.kind in COMPUTE:
            self._meet("backward")
        elif self._agreed:
            self._meet("update")  # after the first update operation, before the others
        elif op.kind is Kind.AGREE:
            self._agreed = True

    def _meet(self, moment: str) -> None:
        for fault in [fault for fault in self._due if _moment(fault) == moment]:
            self._due.remove(fault)
            if not self._faults.strikes(fault):
                continue
            if fault.kind == "kill":
                kill_process()
            elif fault.kind == "stall":
                time.sleep(fault.seconds)
            else:
                flip_bit(self._exchange.parameters.array)


def _moment(fault: ChaosFault) -> str:
    if fault.kind == "kill":
        return fault.how
    if fault.kind == "stall":
        return "begin"
    return END_OF_STEP if fault.how == "parameters" else ""


def largest_index(values: Array) -> int:
    """Return the index of the value with the largest magnitude."""
    return int(np.abs(backend.to_host(values).astype(np.float64)).argmax())


def flip_bit(values: Array) -> None:
    """Flip the highest mantissa bit of the value with the largest magnitude. The value stays finite."""
    if values.size:
        index = largest_index(values)
        damaged = backend.to_host(values[index : index + 1]).copy()
        bits = damaged.view(f"u{damaged.itemsize}")
        bits ^= bits.dtype.type(1 << (MANTISSA_BITS[str(damaged.dtype)] - 1))
        values[index : index + 1] = backend.place(damaged, "gpu" if backend.is_device(values) else "cpu")


def make_infinite(values: Array) -> None:
    """Set the value with the largest magnitude to infinity."""
    values[largest_index(values)] = np.inf


def refuse_impossible_faults(config: ChaosConfig, comm: Communicator, writers: str, exchange: Exchange) -> None:
    """Raise ConfigurationError on all ranks if a fault of ``config`` could never happen. Collective.

    ``writers``: value of the recipe key checkpoint.writers, which selects the ranks that write checkpoints.
    """
    # Examples: a disk error on a rank that writes no file, or corrupt parameters on a rank that keeps no parameters.
    if any(fault.in_save for fault in config.faults):
        writes: list[bool] = comm.allgather_object(group_of(comm, writers).writes)
        _refuse(
            [fault for fault in config.faults if fault.in_save and not writes[fault.rank]],
            f"writes nothing with checkpoint.writers = {writers!r}; the writing ranks are "
            f"{[rank for rank, is_writer in enumerate(writes) if is_writer]}",
        )
    keeps: list[int] = comm.allgather_object(exchange.parameters.array.size)
    _refuse(
        [fault for fault in config.faults if fault.how == "parameters" and not keeps[fault.rank]],
        "keeps no parameters in memory between steps; choose another rank",
    )


def _refuse(faults: Sequence[ChaosFault], reason: str) -> None:
    for fault in faults:
        raise ConfigurationError(
            f"chaos.{fault.kind} = {fault.rank}@{fault.step} cannot happen: rank {fault.rank} {reason}"
        )
