"""Listening TCP sockets of a process: list them, and restrict them to the loopback interface. Linux only."""

import ipaddress
import os
import socket
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from hpcdist.comm.launch.exit_file import SURVIVE

OPEN_MPI_TRANSPORTS: Final = "OMPI_MCA_btl"
UCX_TRANSPORTS: Final = "UCX_TLS"
TCP_INTERFACE: Final = "OMPI_MCA_btl_tcp_if_include"
FAULT_TOLERANCE: Final = "OMPI_MCA_mpi_ft_enable"  # in the environment of every rank started with --with-ft
_MPIRUN_SIZES: Final = (  # world size, number of ranks on this host, transports
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", OPEN_MPI_TRANSPORTS),
    ("PMI_SIZE", "MPI_LOCALNRANKS", UCX_TRANSPORTS),
)
_LISTENING: Final = "0A"  # TCP_LISTEN in /proc/net/tcp


def listening(pid: int | str = "self") -> dict[int, str]:
    """Return {file descriptor: "address:port"} of the listening TCP sockets of process ``pid``. Local."""
    process = Path("/proc") / str(pid)
    inodes: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (process / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING:
                    inodes[f"socket:[{fields[9]}]"] = _address(fields[1])
    addresses: dict[int, str] = {}
    with suppress(OSError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                target = os.readlink(link)
                if target in inodes:
                    addresses[int(link.name)] = inodes[target]
    return addresses


def rank_listeners() -> list[str]:
    """Return the addresses on which this process listens, except addresses inherited from the launcher. Local."""
    inherited = set(listening(os.getppid()).values())
    return [address for address in listening().values() if address not in inherited]


def _address(text: str) -> str:
    host, _, port = text.partition(":")
    # /proc/net/tcp has hexadecimal words in host byte order.
    words = [bytes.fromhex(host[index : index + 8]) for index in range(0, len(host), 8)]
    address = ipaddress.ip_address(b"".join(word[::-1] if sys.byteorder == "little" else word for word in words))
    return f"[{address}]:{int(port, 16)}" if address.version == 6 else f"{address}:{int(port, 16)}"


def is_loopback(address: str) -> bool:
    """Return True if ``address``, as returned by `listening`, is on the loopback interface."""
    return ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_loopback


def restrict_to_loopback() -> None:
    """If MPI may use TCP only on ``lo``, bind all listening sockets to ``lo``. Needs Linux 5.7 or root. Local."""
    if os.environ.get(TCP_INTERFACE) != "lo":
        return
    for descriptor, address in listening().items():
        if not is_loopback(address):
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")


def exclude_tcp(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set ``environment`` to exclude MPI's TCP transports if a plain mpirun started all ranks on this host.

    Call this before MPI starts. Local.
    """
    if environment.get(SURVIVE) or FAULT_TOLERANCE in environment:
        # With fault tolerance, new ranks need TCP.
        return
    for world_size, local_size, transports in _MPIRUN_SIZES:
        if world_size in environment and environment[world_size] == environment.get(local_size):
            environment.setdefault(transports, "^tcp")
