"""Faults made on purpose: ranks that die or stall, gradients and parameters with other bits, disks that fail.

What happens once leaves a file in the run directory before it does: a run that is resumed, or outlives the fault, makes
the same step again and must not meet it again.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.errors import StorageError
from hpcdist.hdf5.overlay import Overlay
from hpcdist.strategies.schedule.executor import StepResult
from hpcdist.strategies.schedule.operations import COMPUTE, EXCHANGED, Kind, Operation
from hpcdist.strategies.schedule.stages import MicroBatch
from hpcdist.training.chaos_config import ChaosConfig
from hpcdist.training.chaos_disk import FailingFile
from hpcdist.training.chaos_entries import Fault
from hpcdist.training.chaos_slow import SlowedExecutor

DIRECTORY: Final = "chaos"  # in that of the run
MANTISSA: Final = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}  # bits
TAKES: Final = (*EXCHANGED, Kind.COLLECT)  # gradients from here or from others
END: Final = "end"


def die() -> None:
    """End this process as a lost node would: nothing is flushed and nobody is told."""
    os.kill(os.getpid(), signal.SIGKILL)


class Faults:
    """What happens to ``rank`` in the run of ``directory``. Local."""

    def __init__(self, config: ChaosConfig, rank: int, directory: Path) -> None:
        self._own = [fault for fault in config.faults if fault.rank == rank]
        self._directory = directory / DIRECTORY

    def of_step(self, step: int) -> list[Fault]:
        """Return what happens in ``step``, but for what happens in saves."""
        return [fault for fault in self._own if fault.step == step and not fault.in_save]

    def strikes(self, fault: Fault) -> bool:
        """Whether ``fault`` happens now: it has not before, and never will again. Raises StorageError."""
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
        """Return what makes the file of this rank's shard of the checkpoint of ``step``."""
        for fault in self._own:
            if fault.in_save and fault.step <= step and not (self._directory / fault.name).exists():
                how = fault.how if fault.kind == "disk" else fault.kind
                return partial(FailingFile, how=how, strikes=partial(self._in_save, fault))
        return Overlay.created

    def _in_save(self, fault: Fault) -> bool:
        happens = self.strikes(fault)
        if happens and fault.kind == "kill":
            die()
        return happens


class FaultyExecutor(SlowedExecutor):
    """An executor to which things happen; ``faults`` are known once the run has a directory."""

    faults: Faults

    def __init__(self, config: ChaosConfig, rank: int, even_samples: float, *of_executor: Any) -> None:
        super().__init__(config, rank, even_samples, *of_executor)
        self._due: list[Fault] = []  # in the step that is made, and not in another computation of it
        self._agreed = False
        self._handlers = {kind: partial(self._around, handler) for kind, handler in self._handlers.items()}

    def arm(self, faults: Faults) -> None:
        """Let ``faults`` happen; before the first step (local)."""
        self.faults = faults
        carried = self.exchange.carries_out
        sends = {kind: partial(self._send, carried[kind]) for kind in EXCHANGED if kind in carried}
        self.exchange.carries_out = {**carried, **sends}

    def run(
        self,
        operations: Sequence[Operation],
        batches: Sequence[MicroBatch],
        samples: int,
        step: int,
        wishes: np.ndarray,
        first_sample: int = 0,
    ) -> StepResult:
        """Run one step, as `Executor.run`, and what happens in it."""
        self._due, self._agreed = self.faults.of_step(step), False
        try:
            self._meet("begin")
            found = super().run(operations, batches, samples, step, wishes, first_sample)
            self._meet(END)
        finally:
            self._due = []
        return found

    def _around(self, handler: Callable[[Operation], None], op: Operation) -> None:
        if self._due and op.kind in TAKES:
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
        """Let happen what is due at ``moment``."""
        for fault in [fault for fault in self._due if _moment(fault) == moment]:
            self._due.remove(fault)
            if not self.faults.strikes(fault):
                continue
            if fault.kind == "kill":
                die()
            elif fault.kind == "stall":
                time.sleep(fault.seconds)
            else:
                flip(self.exchange.parameters.array)

    def _send(self, handler: Callable[[Operation], None], op: Operation) -> None:
        """Carry out ``op``, which takes gradients; the first that there are may have been damaged by then."""
        due = [fault for fault in self._due if fault.how == "gradients" or fault.kind == "overflow"]
        values = self.gradients_in(op.range) if due and op.range is not None else None
        if values is not None and values.size:
            for fault in due:
                self._due.remove(fault)
                if self.faults.strikes(fault):
                    (flip if fault.kind == "corrupt" else overflow)(values)
        handler(op)


def _moment(fault: Fault) -> str:
    """Return when a fault happens that is no matter of gradients."""
    if fault.kind == "kill":
        return fault.how
    if fault.kind == "stall":
        return "begin"
    return END if fault.how == "parameters" else ""


def largest(values: Array) -> int:
    """Return which of ``values`` has the largest magnitude: never a padding, unless all are zero."""
    return int(np.abs(backend.to_host(values).astype(np.float64)).argmax())


def flip(values: Array) -> None:
    """Flip one bit of ``values``, the first behind the point of the largest: wrong by a third or a half, and finite."""
    if values.size:
        index = largest(values)
        damaged = backend.to_host(values[index : index + 1]).copy()
        bits = damaged.view(f"u{damaged.itemsize}")
        bits ^= bits.dtype.type(1 << (MANTISSA[str(damaged.dtype)] - 1))
        values[index : index + 1] = backend.place(damaged, "gpu" if backend.is_device(values) else "cpu")


def overflow(values: Array) -> None:
    """Make one of ``values`` infinite."""
    values[largest(values)] = np.inf
