"""Apply power limits and clocks for a while, and put them back whatever happens.

    with nvml.NvmlDriver() as driver:
        requested = [(limit, 250.0) for limit in devices.gpu_limits(driver, uuids, devices.GPU_POWER)]
        with apply.limited(requested) as in_force:
            ...  # trains under 250 W

The former limits are put back at the end of the block: by an exception, a signal, or the end of the process too.
After a SIGKILL, `put_back` does it from the record that was written before the first change.

Signals are held back while a limit is changed or put back (`defer_signals`) and become an exception in between
(`raise_on_signals`). Python runs handlers in the main thread only; elsewhere no handler is changed, and limits are
put back at the end of the process.
"""

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from hpcdist.energy.power_limits import devices
from hpcdist.energy.power_limits import journal as kept
from hpcdist.energy.power_limits.devices import CPU_POWER, CpuPowerLimit, DeviceLimit, check_value, is_equal_limit
from hpcdist.energy.power_limits.journal import ChangedLimit, JournalRecord
from hpcdist.energy.sources import nvml
from hpcdist.errors import HpcdistError, MissingCapabilityError

# What ends a process that does not answer: SIGINT raises KeyboardInterrupt already.
FATAL_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class EndedBySignal(BaseException):
    """A signal came that would have ended the process on the spot."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def _raise(number: int, frame: object) -> None:
    raise EndedBySignal(number)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def defer_signals() -> Iterator[None]:
    """Answer signals that come inside at the end of it, as they would have been answered (local)."""
    if not _in_main_thread():
        yield
        return
    came: list[int] = []
    handlers: dict[signal.Signals, Any] = {}
    try:
        for watched in (signal.SIGINT, *FATAL_SIGNALS):
            handler = signal.getsignal(watched)
            if handler not in (None, signal.SIG_IGN):  # None: it is not Python's
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
    """Make exceptions of the signals that would end this process without a word; it ends by them all the same.

    ``last`` is called before it does: what is undone by then may be undone once more.
    """
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


RequestedLimits = tuple[
    DeviceLimit, float | None
]  # what to limit, and to how much in its unit; None: to what holds already


class TemporaryLimits:
    """Some limits, changed by this process. Driven by `limited`."""

    def __init__(self, wanted: Sequence[RequestedLimits], folder: Path) -> None:
        self.in_force: tuple[float | None, ...] = ()
        self._folder, self._owner = folder, os.getpid()
        self._path: Path | None = None
        self._left: list[tuple[DeviceLimit, ChangedLimit]] = []  # to be put back
        self._wanted: list[tuple[DeviceLimit, ChangedLimit]] = []
        for knob, value in wanted:
            if value is not None:
                check_value(knob, value)
            before = knob.now()
            asked = before if value is None else round(value * knob.per_unit)
            self._wanted.append((knob, ChangedLimit(knob.kind, knob.device, knob.place, before, asked)))

    def begin(self) -> None:
        """Write the record and set the limits. Where one cannot be set, the others are put back and it is raised."""
        changes = [change for _, change in self._wanted]
        with kept.locked_journal(self._folder):
            refuse_changed(kept.records(self._folder)[0], changes)
            self._path = kept.write(self._folder, changes)
        try:
            for knob, change in self._wanted:
                knob.put(change.asked)
                self._left.append((knob, change))
                _verify(knob, change.asked)
        except BaseException:
            self.end()
            raise
        self.in_force = tuple(knob.in_force() for knob, _ in self._wanted)

    def end(self) -> None:
        """Put back what is not yet, and remove the record; once more does nothing.

        Raises MissingCapabilityError where a limit could not be put back, after the others have been: the record then
        names it.
        """
        if os.getpid() != self._owner:
            return  # a child that was forked: the limits are its parent's
        failed: list[tuple[DeviceLimit, ChangedLimit]] = []
        reasons = []
        for knob, change in reversed(self._left):
            try:
                knob.put(change.before)
                _verify(knob, change.before)
            except HpcdistError as error:
                failed.insert(0, (knob, change))
                reasons.append(f"{knob.name} is not what it was before ({error}): {knob.cure(change.before)}")
        self._left = failed
        if failed:
            self._path = kept.write(self._folder, [change for _, change in failed], self._path)
            raise MissingCapabilityError(f"{'; '.join(reasons)}; or later: {kept.RESTORE_COMMAND}")
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None


@contextmanager
def limited(wanted: Sequence[RequestedLimits], folder: Path | None = None) -> Iterator[tuple[float | None, ...]]:
    """Limit devices inside; yields what is in force on each, in its unit (None: nobody can tell) (local).

    ``folder`` is that of the records (default: the user's). Signals that would end the process end it at the end of
    this. Raises ConfigurationError for a value out of range, MissingCapabilityError where nobody may change it, another
    process does, or it does not hold, StorageError where no record can be written; nothing is changed then.
    """
    change = TemporaryLimits(wanted, kept.directory() if folder is None else folder)
    atexit.register(change.end)  # should an exception come between what is below
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
    """Raise MissingCapabilityError, with the cure, where this process may not change ``knobs`` (local).

    The only way to know is to try: it sets the power limits that hold already, and frees clocks, as the end of every
    change of them does.
    """
    with limited([(knob, None) for knob in knobs], folder):
        pass


def _verify(knob: DeviceLimit, value: int | None) -> None:
    """Raise MissingCapabilityError where ``knob`` shows another limit than was set."""
    found = knob.now()
    if value is not None and found is not None and not is_equal_limit(found / knob.per_unit, value / knob.per_unit):
        raise MissingCapabilityError(
            f"{knob.name}: {value / knob.per_unit:g} {knob.unit} was set, and {found / knob.per_unit:g} {knob.unit} is "
            "what it shows: firmware, or a service of this machine, keeps it"
        )


def refuse_changed(records: Iterable[JournalRecord], changes: Iterable[ChangedLimit]) -> None:
    """Raise MissingCapabilityError where one of ``records`` says that another process has changed the same limits."""
    mine = {change.key for change in changes}
    for record in records:
        others = [change for change in record.changes if change.key in mine]
        if not others or not record.is_of_this_start:
            continue
        devices = ", ".join(dict.fromkeys(change.device for change in others))
        if record.is_at_work:
            raise MissingCapabilityError(
                f"process {record.pid} of this machine has changed the limits of {devices} since {record.created_utc}; "
                "wait for its end, or choose other devices"
            )
        raise MissingCapabilityError(
            f"the limits of {devices} are still those of a process that was killed ({record.pid}, "
            f"{record.created_utc}); put them back first: {kept.RESTORE_COMMAND}"
        )


def put_back(folder: Path, say: Callable[[str], None]) -> bool:
    """Put back what killed processes of this machine have left changed, and say so; return whether all is well (local).

    A limit that somebody has changed since is left as it is. Records of other machines, on a shared home, are too.
    """
    if not folder.is_dir():
        say("nothing was left changed")
        return True
    well = True
    with kept.locked_journal(folder), ExitStack() as stack:
        records, unreadable = kept.records(folder)
        for line in unreadable:
            say(line)
            well = False
        for record in records:
            well &= _put_back(record, stack, say)
        if not records and not unreadable:
            say("nothing was left changed")
    return well


def _put_back(record: JournalRecord, stack: ExitStack, say: Callable[[str], None]) -> bool:
    if not record.is_of_this_start:
        if record.host != os.uname().nodename:
            say(f"{record.path.name}: of {record.host}; run `{kept.RESTORE_COMMAND}` there")
            return True
        say(f"{record.path.name}: {record.host} was started again since, which puts limits back")
        record.path.unlink(missing_ok=True)
        return True
    if record.is_at_work:
        say(f"{record.path.name}: process {record.pid} is at work, and puts its limits back itself")
        return True
    failed = []
    for change in record.changes:
        try:
            say(_put_one_back(change, stack))
        except HpcdistError as error:
            failed.append(change)
            say(f"{change.device}: not put back: {error}")
    if failed:
        return False
    record.path.unlink(missing_ok=True)
    return True


def _put_one_back(change: ChangedLimit, stack: ExitStack) -> str:
    """Put one limit back, unless somebody has changed it since; return what was done."""
    knob: DeviceLimit
    if change.kind in devices.GPU_LIMIT_KINDS:
        stack.enter_context(nvml.NvmlDriver())  # counted: handles are good until the last is closed
        knob = devices.GPU_LIMIT_KINDS[change.kind](change.device)
    elif change.kind == CPU_POWER:
        knob = CpuPowerLimit(Path(change.place), change.device)
    else:
        raise MissingCapabilityError(f"{change.kind!r} is no kind of limit that this version knows")
    now = knob.now()
    if now is None or change.before is None:
        knob.put(change.before)
        return f"{knob.name}: free again"
    unit, here, before = knob.unit, now / knob.per_unit, change.before / knob.per_unit
    if is_equal_limit(here, before):
        return f"{knob.name}: {here:g} {unit}, as it was"
    if change.asked is not None and not is_equal_limit(here, change.asked / knob.per_unit):
        return (
            f"{knob.name}: {here:g} {unit}, which somebody else has set since; left as it is (it was {before:g} {unit})"
        )
    knob.put(change.before)
    _verify(knob, change.before)
    return f"{knob.name}: {before:g} {unit} again (it was at {here:g} {unit})"
