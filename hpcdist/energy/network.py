"""Bytes that went through the interfaces of a node, whoever sent them: Ethernet from /proc/net/dev, InfiniBand's own.

What RDMA sends over Ethernet is counted by its InfiniBand port and not by the interface; what IP sends over InfiniBand
is counted by both, and taken once. Slingshot counts what passes by its interfaces elsewhere, out of our reach.
"""

from pathlib import Path
from typing import Final

from hpcdist.energy import sysfiles

WORD_BYTES: Final = 4  # InfiniBand counts in words of four bytes
INFINIBAND: Final = "32"  # ARPHRD_INFINIBAND, of an interface for IP over it
_RECEIVED: Final = 0  # of the columns of /proc/net/dev
_SENT: Final = 8


class Network:
    """The interfaces of this node from construction on (local). ``proc`` and ``sys`` are where Linux shows them."""

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._dev, self._sys = proc / "net" / "dev", sys
        self._ports = sorted((sys / "class" / "infiniband").glob("*/ports/*/counters"))
        self._interfaces = frozenset(self._real())
        self._last: dict[str, int] = {}
        self._sums = [0, 0]
        self.read()

    def read(self) -> tuple[int, int] | None:
        """Return the bytes sent and received since construction; None where no interface can be read (local).

        A counter that was set back, as that of a port that went down, starts again from there.
        """
        now = self._counters()
        if not now:
            return None
        for name, value in now.items():
            used = value - self._last.get(name, value)
            self._sums[name.endswith("received")] += max(0, used)
        self._last = now
        return self._sums[0], self._sums[1]

    def _counters(self) -> dict[str, int]:
        found = {}
        for name, columns in _table(self._dev).items():
            if name in self._interfaces:
                found[f"{name} sent"], found[f"{name} received"] = columns[_SENT], columns[_RECEIVED]
        for port in self._ports:
            try:
                found[f"{port} sent"] = WORD_BYTES * int(sysfiles.text(port / "port_xmit_data"))
                found[f"{port} received"] = WORD_BYTES * int(sysfiles.text(port / "port_rcv_data"))
            except (OSError, ValueError):
                continue  # a port without these counters
        return found

    def _real(self) -> list[str]:
        """Return the interfaces that are devices; in a container, which has none, all but the loopback and bridges."""
        folder = self._sys / "class" / "net"
        names = [name for name in _table(self._dev) if name != "lo"]
        devices = [name for name in names if (folder / name / "device").exists()]
        own = devices or [name for name in names if not (folder / name / "bridge").exists()]
        return [name for name in own if not (self._ports and _says(folder / name / "type") == INFINIBAND)]


def _table(path: Path) -> dict[str, list[int]]:
    """Return the counters of each interface; none where the file cannot be read."""
    try:
        lines = sysfiles.text(path).splitlines()[2:]
        split = [line.partition(":") for line in lines]
        return {name.strip(): [int(word) for word in rest.split()] for name, _, rest in split}
    except (OSError, ValueError):
        return {}


def _says(path: Path) -> str:
    try:
        return sysfiles.text(path).strip()
    except OSError:
        return ""
