"""Apply power limits and clocks temporarily, and restore them however the process ends.

    with nvml.NvmlDriver() as driver:
        requested = [(limit, 250.0) for limit in limit_devices.gpu_limits(driver, uuids, limit_devices.GPU_POWER)]
        with power_limits.limited(requested) as in_force:
            ...  # trains under 250 W

After a SIGKILL, `put_back` restores the limits from a journal record, which is written before the first change.
"""

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from hpcdist.energy import limit_devices, limit_journal
from hpcdist.energy.limit_devices import CPU_POWER, CpuPowerLimit, DeviceLimit, check_value, is_equal_limit
from hpcdist.energy.limit_journal import RESTORE_COMMAND, ChangedLimit, JournalRecord
from hpcdist.energy.sources import nvml
from hpcdist.errors import HpcdistError, MissingCapabilityError

# Signals that end a process without a handler; SIGINT raises KeyboardInterrupt already.
FATAL_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class EndedBySignal(BaseException):
    """Exception that a fatal signal raises, so that device limits are restored before the process ends."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def _raise(number: int, frame: object) -> None:
    raise EndedBySignal(number)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def defer_signals() -> Iterator[None]:
    """Context manager that delays signals until the end of the ``with`` block. Local."""
    if not _in_main_thread():
        yield
        return
    came: list[int] = []
    handlers: dict[signal.Signals, Any] = {}
    try:
        for watched in (signal.SIGINT, *FATAL_SIGNALS):
            handler = signal.getsignal(watched)
            if handler not in (None, signal.SIG_IGN):  # None: the handler is not Python's
                handlers[watched] = handler
                signal.signal(watched, lambda number, frame: came.append(number))
        yield
    finally:
        for watched, handler in handlers.items():
            signal.signal(watched, handler)
        for number in dict.fromkeys(came):
            signal.raise_signal(number)


@contextmanager
def raise_on_signals(last: Callable[[], None]) -> Iterator[None]:
    """Context manager that raises `EndedBySignal` on a fatal signal. It then calls ``last`` and ends this process."""
    mine = [number for number in FATAL_SIGNALS if _in_main_thread() and signal.getsignal(number) is signal.SIG_DFL]
    ended: EndedBySignal | None = None
    try:
        for number in mine:
            signal.signal(number, _raise)
        yield
    except EndedBySignal as error:
        ended = error
        for number in mine:
            signal.signal(number, signal.SIG_IGN)
        last()
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)
    if ended is not None:
        os.kill(os.getpid(), ended.number)


# A limit and its value in the unit of the device, or None for the value already set.
RequestedLimits = tuple[DeviceLimit, float | None]


class TemporaryLimits:
    """Device limits that this process changes and later restores."""

    def __init__(self, requested: Sequence[RequestedLimits], folder: Path) -> None:
        self.in_force: tuple[float | None, ...] = ()
        self._folder, self._owner = folder, os.getpid()
        self._path: Path | None = None
        self._left: list[tuple[DeviceLimit, ChangedLimit]] = []  # changed and not restored yet
        self._planned: list[tuple[DeviceLimit, ChangedLimit]] = []
        for knob, value in requested:
            if value is not None:
                check_value(knob, value)
            before = knob.now()
            target = before if value is None else round(value * knob.per_unit)
            self._planned.append((knob, ChangedLimit(knob.kind, knob.device, knob.place, before, target)))

    def begin(self) -> None:
        """Record the changes in the journal, and set the limits. On failure, restore all limits and raise."""
        changes = [change for _, change in self._planned]
        with limit_journal.locked_journal(self._folder):
            refuse_changed(limit_journal.records(self._folder)[0], changes)
            self._path = limit_journal.write(self._folder, changes)
        try:
            for knob, change in self._planned:
                knob.put(change.asked)
                self._left.append((knob, change))
                _verify(knob, change.asked)
        except BaseException:
            self.end()
            raise
        self.in_force = tuple(knob.in_force() for knob, _ in self._planned)

    def end(self) -> None:
        """Restore the changed limits, and remove the journal record. Raises MissingCapabilityError on failure."""
        if os.getpid() != self._owner:
            return  # in a forked child: the limits belong to its parent
        failed: list[tuple[DeviceLimit, ChangedLimit]] = []
        reasons = []
        for knob, change in reversed(self._left):
            try:
                knob.put(change.before)
                _verify(knob, change.before)
            except HpcdistError as error:
                failed.insert(0, (knob, change))
                reasons.append(f"{knob.name} could not be restored ({error}): {knob.cure(change.before)}")
        self._left = failed
        if failed:
            # The journal record keeps only these limits.
            self._path = limit_journal.write(self._folder, [change for _, change in failed], self._path)
            raise MissingCapabilityError(
                f"device limits are still changed: {'; '.join(reasons)}; to restore, run {RESTORE_COMMAND}"
            )
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None


@contextmanager
def limited(requested: Sequence[RequestedLimits], folder: Path | None = None) -> Iterator[tuple[float | None, ...]]:
    """Context manager that changes device limits. Yields the limits in force in W or MHz (None: unknown). Local.

    ``requested``: pairs (limit, new value or None to keep the present value). ``folder``: journal directory. Raises
    ConfigurationError, StorageError, and MissingCapabilityError if a limit cannot be changed.
    """
    change = TemporaryLimits(requested, limit_journal.directory() if folder is None else folder)
    atexit.register(change.end)  # in case of an exception between the statements below
    try:
        with raise_on_signals(change.end):
            with defer_signals():
                change.begin()
            try:
                yield change.in_force
            finally:
                with defer_signals():
                    change.end()
    finally:
        with defer_signals():
            change.end()
            atexit.unregister(change.end)


def check_permitted(knobs: Iterable[DeviceLimit], folder: Path | None = None) -> None:
    """Raise MissingCapabilityError if this process may not change all ``knobs``. ``folder``: journal's directory."""
    with limited([(knob, None) for knob in knobs], folder):
        pass


def _verify(knob: DeviceLimit, value: int | None) -> None:
    shown = knob.now()
    if value is not None and shown is not None and not is_equal_limit(shown / knob.per_unit, value / knob.per_unit):
        raise MissingCapabilityError(
            f"{knob.name}: {value / knob.per_unit:g} {knob.unit} was set, but the device reports "
            f"{shown / knob.per_unit:g} {knob.unit}: firmware or a system service overrides it; choose another value"
        )


def refuse_changed(records: Iterable[JournalRecord], changes: Iterable[ChangedLimit]) -> None:
    """Raise MissingCapabilityError if ``records`` show that another process has changed a limit in ``changes``."""
    mine = {change.key for change in changes}
    for record in records:
        others = [change for change in record.changes if change.key in mine]
        if not others or not record.is_of_this_boot:
            continue
        devices = ", ".join(dict.fromkeys(change.device for change in others))
        if record.is_active:
            raise MissingCapabilityError(
                f"process {record.pid} of this machine has changed the limits of {devices} since {record.created_utc}; "
                "wait until the process ends, or choose other devices"
            )
        raise MissingCapabilityError(
            f"the limits of {devices} were changed at {record.created_utc} by process {record.pid}, which was killed "
            f"before it restored the limits; first run {RESTORE_COMMAND}"
        )


def put_back(folder: Path, say: Callable[[str], None]) -> bool:
    """Restore limits that killed processes changed. ``say``: prints a line. Return True if all were restored. Local."""
    if not folder.is_dir():
        say("no changed limits were left")
        return True
    well = True
    with limit_journal.locked_journal(folder), ExitStack() as stack:
        records, unreadable = limit_journal.records(folder)
        for line in unreadable:
            say(line)
            well = False
        for record in records:
            # Limits of other machines, and limits that another process has changed since, are left alone.
            well &= _put_back(record, stack, say)
        if not records and not unreadable:
            say("no changed limits were left")
    return well


def _put_back(record: JournalRecord, stack: ExitStack, say: Callable[[str], None]) -> bool:
    if not record.is_of_this_boot:
        if record.host != os.uname().nodename:
            say(f"{record.path.name}: of {record.host}; run `{RESTORE_COMMAND}` there")
            return True
        say(f"{record.path.name}: {record.host} was restarted since, which resets limits")
        record.path.unlink(missing_ok=True)
        return True
    if record.is_active:
        say(f"{record.path.name}: process {record.pid} still runs, and restores its limits itself")
        return True
    failed = []
    for change in record.changes:
        try:
            say(_put_one_back(change, stack))
        except HpcdistError as error:
            failed.append(change)
            say(f"{change.device}: not restored: {error}")
    if failed:
        return False
    record.path.unlink(missing_ok=True)
    return True


def _put_one_back(change: ChangedLimit, stack: ExitStack) -> str:
    knob: DeviceLimit
    if change.kind in limit_devices.GPU_LIMIT_KINDS:
        stack.enter_context(nvml.NvmlDriver())  # NVML counts inits: handles are valid until the last shutdown
        knob = limit_devices.GPU_LIMIT_KINDS[change.kind](change.device)
    elif change.kind == CPU_POWER:
        knob = CpuPowerLimit(Path(change.place), change.device)
    else:
        raise MissingCapabilityError(
            f"the journal has limits of the unknown kind {change.kind!r}; restore these limits with a newer hpcdist"
        )
    now = knob.now()
    if now is None or change.before is None:
        knob.put(change.before)
        return f"{knob.name}: free again"
    unit, here, before = knob.unit, now / knob.per_unit, change.before / knob.per_unit
    if is_equal_limit(here, before):
        return f"{knob.name}: {here:g} {unit}, as it was"
    if change.asked is not None and not is_equal_limit(here, change.asked / knob.per_unit):
        return f"{knob.name}: {here:g} {unit}, set by another process since; left as it is (it was {before:g} {unit})"
    knob.put(change.before)
    _verify(knob, change.before)
    return f"{knob.name}: {before:g} {unit} again (it was at {here:g} {unit})"
