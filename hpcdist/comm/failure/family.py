"""Base class of communicators: what a communicator shares with the communicators that are derived from it.

Derived communicators are the results of split, dup and nodes, at any depth. They share the event sink and the checks of
the calls, and ULFM (the extension of MPI for rank failures) must revoke and free them together.
"""

import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from hpcdist.comm.transport import NULL_SINK, UNKNOWN_BYTES, EventSink
from hpcdist.errors import MissingCapabilityError

Result = TypeVar("Result")
Key = TypeVar("Key")
Value = TypeVar("Value")
Made = TypeVar("Made", bound="CommunicatorFamily")
_descendants_lock: Final = threading.Lock()


class PerCommunicator(Generic[Key, Value]):
    """Cache with one dict per communicator. ``comm.caches[cache]`` is the dict of this cache for ``comm``."""


class _Caches(dict[Any, Any]):
    # A dict, because a method call for each look-up would be measurable in an allreduce of 8 bytes.
    if TYPE_CHECKING:

        def __getitem__(self, cache: PerCommunicator[Key, Value]) -> dict[Key, Value]: ...

    def __missing__(self, cache: PerCommunicator[Key, Value]) -> dict[Key, Value]:
        created: dict[Key, Value] = {}
        self[cache] = created
        return created


class CommunicatorFamily(ABC):
    """Base class of `communicator.Communicator`: event sink, checks of the calls, and methods for rank failures."""

    name: str
    declared_node: int | None

    def __init__(self) -> None:
        self._sink_cell: list[EventSink] = [NULL_SINK]  # shared with all derived communicators
        self._checked = False
        self.is_comparing = False  # True while the ranks compare their calls before a collective
        self.caches = _Caches()
        # All communicators derived from this one (split, dup, nodes), at any depth. They are revoked together, because
        # ULFM revokes only one, and a rank may wait in any. Weak references, so that unused communicators are freed.
        self._descendants: weakref.WeakSet[CommunicatorFamily] = weakref.WeakSet()
        self._registries = [self._descendants]  # sets to enter descendants in: this set, and the sets of the ancestors
        self._revoked: set[CommunicatorFamily] = set()  # descendants to free: strong references until `abandon`

    @property
    def events(self) -> EventSink:
        """The event sink of this communicator and of all communicators derived from it."""
        return self._sink_cell[0]

    @events.setter
    def events(self, sink: EventSink) -> None:
        self._sink_cell[0] = sink

    @property
    def checked(self) -> bool:
        """True if ranks compare their calls before each collective. Derived communicators inherit this value."""
        return self._checked

    @checked.setter
    def checked(self, checked: bool) -> None:
        self._checked = checked
        self.caches.clear()

    def observe_like(self, other: "CommunicatorFamily") -> None:
        """Use the event sink and the value of `checked` of the communicator ``other``. Local."""
        self._sink_cell = other._sink_cell
        self.checked = other.checked

    def observe_nothing(self) -> None:
        """Record no events of this communicator, nor of communicators derived from it later. Local."""
        self._sink_cell = [NULL_SINK]

    def _recorded(
        self, op: str, function: Callable[..., Result], *arguments: Any, count: int = 0, peer: int = -1
    ) -> Result:
        token = self.events.begin(self.name, op, "uint8", count, UNKNOWN_BYTES, peer, 0)
        result = function(*arguments)
        self.events.end(token)
        return result

    def _passed_on(self, made: Made) -> Made:
        made.observe_like(self)
        return made

    def _adopt(self, child: "CommunicatorFamily") -> None:
        child._registries += self._registries
        with _descendants_lock:
            for registry in self._registries:
                registry.add(child)

    def _take_descendants(self) -> list["CommunicatorFamily"]:
        with _descendants_lock:  # a progress thread may create communicators
            return list(self._descendants)

    def revoke(self) -> None:
        """Make all operations on this communicator and its derived communicators fail on every rank. Local."""
        # Afterwards only `failed`, `agree`, `shrink` and `abandon` work.
        self._check_survivable("revoke")
        self._revoked.update(self._take_descendants())
        for descendant in self._revoked:
            descendant._revoke()
        self._revoke()

    def agree(self, flag: bool) -> bool:
        """Return True if ``flag`` is True on all survivors. Works after `revoke`. Collective over the survivors."""
        self._check_survivable("agree")
        return self._recorded("agree", self._agree, flag)

    def shrink(self, label: str = "world") -> Self:
        """Return a communicator of the surviving ranks in their old order. Collective over the survivors."""
        # If a rank dies during this call, the next operation reports the failure.
        self._check_survivable("shrink")
        return self._passed_on(self._recorded("shrink", self._shrink, label))

    def grow(self, count: int, arguments: Sequence[str], environment: Mapping[str, str], label: str) -> Self:
        """Start ``count`` Python processes with these ``arguments`` and ``environment``. Collective.

        Return a communicator of the old and the new ranks. ``label``: text for the communicator's name.
        """
        self._check_survivable("grow")
        return self._passed_on(self._recorded("grow", self._grow, count, arguments, environment, label))

    def abandon(self) -> None:
        """Free this revoked communicator and its derived communicators. MPI errors are ignored. Local."""
        to_free = {*self._take_descendants(), *self._revoked, self}
        self._revoked.clear()
        for communicator in to_free:
            communicator.caches.clear()
            with contextlib.suppress(Exception):
                communicator._abandon()

    def _check_survivable(self, operation: str) -> None:
        if not self.supports("ulfm"):
            raise MissingCapabilityError(
                f"{operation}() on {self.name} needs the fault tolerance of MPI (ULFM), which is off; start the job by "
                "Open MPI's `mpirun --with-ft ulfm`, or let the job end and start the job again"
            )

    @abstractmethod
    def supports(self, feature: str) -> bool:
        """Return True if the transport supports ``feature``: "device_pointers", "thread_multiple" or "ulfm". Local."""

    @abstractmethod
    def _revoke(self) -> None: ...
    @abstractmethod
    def failed(self) -> tuple[int, ...]:
        """Return the failed ranks, in ascending order, that this rank has detected. Other ranks may differ. Local."""

    @abstractmethod
    def _agree(self, flag: bool) -> bool: ...
    @abstractmethod
    def _shrink(self, name: str) -> Self: ...
    @abstractmethod
    def _grow(self, count: int, arguments: Sequence[str], environment: Mapping[str, str], name: str) -> Self: ...
    @abstractmethod
    def _abandon(self) -> None: ...
