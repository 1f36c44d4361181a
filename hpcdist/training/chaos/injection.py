"""Inject stragglers and faults into a run: slow, dying or stalling ranks, flipped bits, failing disks.

Without chaos in the recipe there are no such observers. The time of a straggler is added operation by operation, so
that what an exchange does between them meets it where a slower processor would have it; bits stay the same.

A fault leaves a file in the run directory before it happens: a run that is resumed, or survives it, makes the same step
again and must not meet it again.
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
from hpcdist.checkpoint.saving.two_phase import group_of
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigurationError, StorageError
from hpcdist.hdf5.overlay import Overlay
from hpcdist.strategies.core.exchange import Exchange
from hpcdist.strategies.schedule.operations import COMPUTE, EXCHANGED, Kind, Operation
from hpcdist.strategies.schedule.step import Handler, RunningStep, StepObserver
from hpcdist.training.chaos.config import ChaosConfig, ChaosFault

SLOWDOWN_STREAM: Final = 0x6368616F73  # names the random stream of slow steps, apart from those of data and parameters
SLEEP_SLICE_S: Final = 1e-3  # a rank that serves others beside its own work looks so often what has come


def is_slow(config: ChaosConfig, rank: int, step: int) -> bool:
    """Whether ``step`` is a slow one of ``rank`` (local)."""
    if rank not in config.slow_ranks:
        return False
    return bool(rng.stream(config.seed, SLOWDOWN_STREAM, rank, step).random() < config.slow_probability)


class SlowdownTimer:
    """Timer of the sleeps that stretch the operations of a step.

    A step of ``count`` operations takes ``least_s``, spread evenly over them, or what they need themselves if that is
    more, and then ``factor`` times that.
    """

    def __init__(self, count: int, least_s: float, factor: float) -> None:
        self._count, self._least_s, self._factor = count, least_s, factor
        self._done, self._computed_s, self._taken_s = 0, 0.0, 0.0

    def lacking_s(self, computed_s: float) -> float:
        """Return the seconds to sleep after the next operation, which took ``computed_s`` by itself."""
        self._done += 1
        self._computed_s += computed_s
        due_s = self._factor * max(self._computed_s, self._least_s * self._done / self._count)
        return max(0.0, due_s - self._taken_s - computed_s)

    def took(self, seconds: float) -> None:
        """Add the ``seconds`` of the operation and its sleep."""
        self._taken_s += seconds


class Slowdown(StepObserver):
    """Observer that slows down the steps of rank ``rank``; an even share of a step has ``even_samples`` samples."""

    def __init__(self, config: ChaosConfig, rank: int, even_samples: float, exchange: Exchange) -> None:
        self._config, self._rank, self._even_samples, self._exchange = config, rank, even_samples, exchange
        self._pace: SlowdownTimer | None = None  # evaluations and repetitions of a step are not slowed down

    def around(self, kind: Kind, handler: Handler) -> Handler:
        """Return ``handler`` at the pace of this rank, where it computes."""
        return partial(self._paced, handler) if kind in COMPUTE else handler

    def begin_step(self, number: int, operations: Sequence[Operation], sizes: Sequence[int]) -> None:
        """Start the timer of the step, by the share that this rank has of it."""
        count = sum(operation.kind in (Kind.FORWARD, Kind.BACKWARD) for operation in operations)
        factor = self._config.slow_factor if is_slow(self._config, self._rank, number) else 1.0
        self._pace = SlowdownTimer(count, self._config.step_s * sum(sizes) / self._even_samples, factor)

    def leave_step(self) -> None:
        """Stop slowing down: evaluations run at full speed."""
        self._pace = None

    def _paced(self, compute: Handler, op: Operation) -> None:
        begun = time.perf_counter()
        compute(op)
        if self._pace is None:
            return
        backend.synchronise(self._exchange.parameters.array)  # a GPU is as slow as the step says, not its queue
        self._sleep(self._pace.lacking_s(time.perf_counter() - begun))
        self._pace.took(time.perf_counter() - begun)

    def _sleep(self, seconds: float) -> None:
        """Sleep; where other ranks are served beside the own work, serve their requests meanwhile."""
        exchange = self._exchange
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            time.sleep(min(left, SLEEP_SLICE_S) if exchange.serves_beside else left)
            if exchange.serves_beside:
                exchange.handlers[Kind.COLLECT](Operation(Kind.COLLECT))


DISK_ERRNO: Final = {"fail": errno.EIO, "full": errno.ENOSPC, "fsync": errno.EIO}


class FailingFile(Overlay):
    """New file at ``path`` whose writing fails by ``how``: fail, full, fsync, or kill.

    ``strikes`` is called just before, and returns whether the fault happens; it does not return where it kills. Half of
    the bytes are written before, but for a write that fails as a whole. A file without a second half fails at its
    fsync.
    """

    def __init__(self, path: Path, how: str, strikes: Callable[[], bool]) -> None:
        super().__init__(path, create=True)
        self._how, self._strikes = how, strikes

    def pwrite(self, data: memoryview, offset: int) -> None:
        """Write to the disk, up to the middle of the file."""
        middle = os.fstat(self._fd).st_size // 2
        if self._how != "fsync" and offset + data.nbytes > middle:
            if self._how != "fail":
                super().pwrite(data[: max(0, middle - offset)], offset)
            self._strike()
        super().pwrite(data, offset)

    def fsync(self) -> None:
        """Fail, or flush the file to the disk."""
        self._strike()
        super().fsync()

    def _strike(self) -> None:
        if self._strikes():
            number = DISK_ERRNO[self._how]
            raise OSError(number, os.strerror(number))


MARKER_DIRECTORY: Final = "chaos"  # in that of the run
MANTISSA_BITS: Final = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}  # bits
GRADIENT_EXCHANGES: Final = (*EXCHANGED, Kind.COLLECT)  # kinds that take gradients of this rank or of others
END_OF_STEP: Final = "end"


def kill_process() -> None:
    """Kill this process as a lost node would: nothing is flushed, no other rank gets a message."""
    os.kill(os.getpid(), signal.SIGKILL)


class FaultPlan:
    """Faults of ``rank`` in the run of ``directory``. Local."""

    def __init__(self, config: ChaosConfig, rank: int, directory: Path) -> None:
        self._own = [fault for fault in config.faults if fault.rank == rank]
        self._directory = directory / MARKER_DIRECTORY

    def of_step(self, step: int) -> list[ChaosFault]:
        """Return the faults of ``step``, without those of saves."""
        return [fault for fault in self._own if fault.step == step and not fault.in_save]

    def strikes(self, fault: ChaosFault) -> bool:
        """Whether ``fault`` happens now: it has not before, and never will again. Raises StorageError."""
        # O_EXCL makes the marker the one decision, also for a start that makes the same step again after a kill.
        try:
            self._directory.mkdir(exist_ok=True)
            os.close(os.open(self._directory / fault.name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            return False
        except OSError as error:
            raise StorageError(f"{self._directory / fault.name} cannot be made: {error.strerror}") from error
        print(f"hpcdist: chaos: {fault.described()}", file=sys.stderr, flush=True)
        return True

    def opens(self, step: int) -> Callable[[Path], Overlay]:
        """Return the function that creates the file of this rank's shard of the checkpoint of ``step``."""
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
    """Observer that lets the ``faults`` of a rank happen in its steps, to the parameters and gradients of ``exchange``.

    None happens in another computation of the same step.
    """

    def __init__(self, faults: FaultPlan, exchange: Exchange) -> None:
        self._faults, self._exchange = faults, exchange
        self._due: list[ChaosFault] = []  # in the step that is made
        self._agreed = False

    def around(self, kind: Kind, handler: Handler) -> Handler:
        """Return ``handler`` with the faults that are due before and after it."""
        return partial(self._around, handler)

    def begin_step(self, number: int, operations: Sequence[Operation], sizes: Sequence[int]) -> None:
        """Trigger the faults that are due before the step."""
        self._due, self._agreed = self._faults.of_step(number), False
        self._meet("begin")

    def complete_step(self, step: RunningStep, sums: np.ndarray) -> None:
        """Trigger the faults that are due after the step."""
        self._meet(END_OF_STEP)

    def leave_step(self) -> None:
        """Trigger nothing until the next step."""
        self._due = []

    def exchanges(self, step: RunningStep, op: Operation) -> None:
        """Damage the first gradients that are about to be exchanged, where that is due."""
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
            self._meet("update")  # its first operation is through, others are not
        elif op.kind is Kind.AGREE:
            self._agreed = True

    def _meet(self, moment: str) -> None:
        """Trigger the faults that are due at ``moment``."""
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
    """Return the moment of a fault; "" of one that damages gradients."""
    if fault.kind == "kill":
        return fault.how
    if fault.kind == "stall":
        return "begin"
    return END_OF_STEP if fault.how == "parameters" else ""


def largest_index(values: Array) -> int:
    """Return the index of the largest magnitude in ``values``: never a padding, unless all are zero."""
    return int(np.abs(backend.to_host(values).astype(np.float64)).argmax())


def flip_bit(values: Array) -> None:
    """Flip the highest mantissa bit of the largest of ``values``: wrong by a third or a half, and finite."""
    if values.size:
        index = largest_index(values)
        damaged = backend.to_host(values[index : index + 1]).copy()
        bits = damaged.view(f"u{damaged.itemsize}")
        bits ^= bits.dtype.type(1 << (MANTISSA_BITS[str(damaged.dtype)] - 1))
        values[index : index + 1] = backend.place(damaged, "gpu" if backend.is_device(values) else "cpu")


def make_infinite(values: Array) -> None:
    """Make one of ``values`` infinite."""
    values[largest_index(values)] = np.inf


def refuse_impossible_faults(config: ChaosConfig, comm: Communicator, writers: str, exchange: Exchange) -> None:
    """Raise ConfigurationError, on all ranks, where a fault of ``config`` could never happen. Collective.

    ``writers`` is ``checkpoint.writers``: a fault in a save needs a rank that writes.
    """
    if any(fault.in_save for fault in config.faults):
        writes: list[bool] = comm.allgather_object(group_of(comm, writers).writes)
        _refuse(
            [fault for fault in config.faults if fault.in_save and not writes[fault.rank]],
            f"which writes nothing with checkpoint.writers = {writers!r}; those who write are "
            f"{[rank for rank, own in enumerate(writes) if own]}",
        )
    keeps: list[int] = comm.allgather_object(exchange.parameters.array.size)
    _refuse(
        [fault for fault in config.faults if fault.how == "parameters" and not keeps[fault.rank]],
        "which keeps no parameters in memory between steps; name another",
    )


def _refuse(faults: Sequence[ChaosFault], why: str) -> None:
    """Raise ConfigurationError for the first of ``faults``, if any."""
    for fault in faults:
        raise ConfigurationError(f"chaos.{fault.kind} has {fault.rank}@{fault.step}: rank {fault.rank}, {why}")
