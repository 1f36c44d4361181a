"""Limits of power and clocks that hold for a while, and are put back whatever happens.

    with nvml.Driver() as driver:
        wanted = [(knob, 250.0) for knob in limits_gpu.gpus(driver, uuids, GPU_POWER)]
        with limits.limited(wanted) as in_force:
            ...  # trains under 250 W

What was before is put back at the end of the block: by an exception, a signal, or the end of the process too. After a
SIGKILL, `put_back` does it from the record that was written before the first change. Nothing here is called but for
a user who has asked for it.
"""

import atexit
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hpcdist.energy import limits_gpu, nvml
from hpcdist.energy import limits_record as kept
from hpcdist.energy import limits_signals as signals
from hpcdist.energy.limits_cpu import CPU_POWER, CpuPower
from hpcdist.energy.limits_knobs import Knob, check, same
from hpcdist.energy.limits_record import Changed, Record
from hpcdist.errors import HpcdistError, MissingCapabilityError

Wanted = tuple[Knob, float | None]  # what to limit, and to how much in its unit; None: to what holds already


class Change:
    """Some limits, changed by this process. Driven by `limited`."""

    def __init__(self, wanted: Sequence[Wanted], folder: Path) -> None:
        self.in_force: tuple[float | None, ...] = ()
        self._folder, self._owner = folder, os.getpid()
        self._path: Path | None = None
        self._left: list[tuple[Knob, Changed]] = []  # to be put back
        self._wanted: list[tuple[Knob, Changed]] = []
        for knob, value in wanted:
            if value is not None:
                check(knob, value)
            before = knob.now()
            asked = before if value is None else round(value * knob.per_unit)
            self._wanted.append((knob, Changed(knob.kind, knob.device, knob.place, before, asked)))

    def begin(self) -> None:
        """Write the record and set the limits. Where one cannot be set, the others are put back and it is raised."""
        changes = [change for _, change in self._wanted]
        with kept.locked(self._folder):
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
        failed: list[tuple[Knob, Changed]] = []
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
            raise MissingCapabilityError(f"{'; '.join(reasons)}; or later: {kept.CURE}")
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None


@contextmanager
def limited(wanted: Sequence[Wanted], folder: Path | None = None) -> Iterator[tuple[float | None, ...]]:
    """Limit devices inside; yields what is in force on each, in its unit (None: nobody can tell) (local).

    ``folder`` is that of the records (default: the user's). Signals that would end the process end it at the end of
    this. Raises ConfigurationError for a value out of range, MissingCapabilityError where nobody may change it, another
    process does, or it does not hold, StorageError where no record can be written; nothing is changed then.
    """
    change = Change(wanted, kept.directory() if folder is None else folder)
    atexit.register(change.end)  # should an exception come between what is below
    try:
        with signals.answered(change.end):
            with signals.deferred():
                change.begin()
            try:
                yield change.in_force
            finally:
                with signals.deferred():
                    change.end()
    finally:
        with signals.deferred():
            change.end()
            atexit.unregister(change.end)


def permitted(knobs: Iterable[Knob], folder: Path | None = None) -> None:
    """Raise MissingCapabilityError, with the cure, where this process may not change ``knobs`` (local).

    The only way to know is to try: it sets the power limits that hold already, and frees clocks, as the end of every
    change of them does.
    """
    with limited([(knob, None) for knob in knobs], folder):
        pass


def _verify(knob: Knob, value: int | None) -> None:
    """Raise MissingCapabilityError where ``knob`` shows another limit than was set."""
    found = knob.now()
    if value is not None and found is not None and not same(found / knob.per_unit, value / knob.per_unit):
        raise MissingCapabilityError(
            f"{knob.name}: {value / knob.per_unit:g} {knob.unit} was set, and {found / knob.per_unit:g} {knob.unit} is "
            "what it shows: firmware, or a service of this machine, keeps it"
        )


def refuse_changed(records: Iterable[Record], changes: Iterable[Changed]) -> None:
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
            f"{record.created_utc}); put them back first: {kept.CURE}"
        )


def put_back(folder: Path, say: Callable[[str], None]) -> bool:
    """Put back what killed processes of this machine have left changed, and say so; return whether all is well (local).

    A limit that somebody has changed since is left as it is. Records of other machines, on a shared home, are too.
    """
    if not folder.is_dir():
        say("nothing was left changed")
        return True
    well = True
    with kept.locked(folder), ExitStack() as stack:
        records, unreadable = kept.records(folder)
        for line in unreadable:
            say(line)
            well = False
        for record in records:
            well &= _put_back(record, stack, say)
        if not records and not unreadable:
            say("nothing was left changed")
    return well


def _put_back(record: Record, stack: ExitStack, say: Callable[[str], None]) -> bool:
    if not record.is_of_this_start:
        if record.host != os.uname().nodename:
            say(f"{record.path.name}: of {record.host}; run `{kept.CURE}` there")
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
            say(_one_back(change, stack))
        except HpcdistError as error:
            failed.append(change)
            say(f"{change.device}: not put back: {error}")
    if failed:
        return False
    record.path.unlink(missing_ok=True)
    return True


def _one_back(change: Changed, stack: ExitStack) -> str:
    """Put one limit back, unless somebody has changed it since; return what was done."""
    knob: Knob
    if change.kind in limits_gpu.KINDS:
        stack.enter_context(nvml.Driver())  # counted: handles are good until the last is closed
        knob = limits_gpu.KINDS[change.kind](change.device)
    elif change.kind == CPU_POWER:
        knob = CpuPower(Path(change.place), change.device)
    else:
        raise MissingCapabilityError(f"{change.kind!r} is no kind of limit that this version knows")
    now = knob.now()
    if now is None or change.before is None:
        knob.put(change.before)
        return f"{knob.name}: free again"
    unit, here, before = knob.unit, now / knob.per_unit, change.before / knob.per_unit
    if same(here, before):
        return f"{knob.name}: {here:g} {unit}, as it was"
    if change.asked is not None and not same(here, change.asked / knob.per_unit):
        return (
            f"{knob.name}: {here:g} {unit}, which somebody else has set since; left as it is (it was {before:g} {unit})"
        )
    knob.put(change.before)
    _verify(knob, change.before)
    return f"{knob.name}: {before:g} {unit} again (it was at {here:g} {unit})"
