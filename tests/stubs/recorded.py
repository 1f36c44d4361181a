"""Simulated runs: recorder files of ranks on hosts with different clocks, computed from true times."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcdist.comm.record import flight_recorder, spans
from hpcdist.comm.record.clock_offsets import ClockReading, HostTable
from hpcdist.comm.record.flight_recorder import POINT_TO_POINT
from hpcdist.hdf5 import files
from hpcdist.telemetry.metrics import side_tables as table


@dataclass(frozen=True)
class Host:
    """A host whose clock shows ``offset_ns + (1 + drift_ppm / 1e6) * t`` at the true time t.

    Its wall clock is 0 at t = 0.
    """

    name: str
    offset_ns: int = 0
    drift_ppm: float = 0.0
    wall_ns: int = 1_700_000_000_000_000_000  # what its wall clock shows at the true time 0

    def local_ns(self, true_ns: int) -> int:
        return true_ns + self.offset_ns + round(true_ns * self.drift_ppm / 1e6)


@dataclass
class Rank:
    """The events of a rank at true times."""

    rank: int
    host: Host
    world: int
    spans: list[tuple[str, str, int, int, int]] = field(default_factory=list)  # phase, name, step, begin, end
    calls: list[tuple[str, str, int, int, int, int, int | None]] = field(default_factory=list)

    def span(self, phase: str, name: str, step: int, begin_ns: int, end_ns: int) -> None:
        self.spans.append((phase, name, step, begin_ns, end_ns))

    def call(
        self, comm: str, op: str, begin_ns: int, end_ns: int | None, *, peer: int = -1, tag: int = 0, sent: int = 0
    ) -> None:
        """Add an operation. ``end_ns`` is None if it never ended."""
        self.calls.append((comm, op, peer, tag, sent, begin_ns, end_ns))

    def write(self, folder: Path, capacity: int = 4096, *, finished: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank-{self.rank:05d}.spans").write_bytes(self._spans(capacity))
        (folder / f"rank-{self.rank:05d}.rec").write_bytes(self._record(capacity, finished))

    def _spans(self, capacity: int) -> bytearray:
        data = bytearray(spans.size_bytes(capacity))
        spans.HEADER.pack_into(
            data, 0, spans.MAGIC, spans.VERSION, self.rank, self.world, capacity, self.host.wall_ns,
            self.host.local_ns(0), self.host.name.encode(), f"boot of {self.host.name}".encode(),
        )  # fmt: skip
        labels: dict[tuple[str, str], int] = {}
        used = 0
        for index, (phase, name, step, begin, end) in enumerate(self.spans, 1):
            if (phase, name) not in labels:
                labels[phase, name] = len(labels)
                text = name.encode()
                at = spans.TEXTS + used
                spans.TEXT.pack_into(data, at, spans.PHASES.index(phase), len(text))
                data[at + spans.TEXT.size : at + spans.TEXT.size + len(text)] = text
                used += spans.TEXT.size + len(text)
            at = spans.RING + index % capacity * spans.SPAN.size
            local_data = self.host.local_ns
            spans.SPAN.pack_into(data, at, index, local_data(begin), local_data(end), step, labels[phase, name], -1, -1)
        data[spans.TEXT_USED * 8 : spans.TEXT_USED * 8 + 8] = used.to_bytes(8, "little")
        return data

    def _record(self, capacity: int, finished: bool) -> bytearray:
        data = bytearray(flight_recorder.size_bytes(capacity))
        kind = flight_recorder.MAGIC, flight_recorder.VERSION
        clocks = self.host.wall_ns, self.host.local_ns(0)
        fields = *kind, self.rank, self.world, 1, capacity, 0, *clocks, self.host.name.encode()
        flight_recorder.HEADER.pack_into(data, 0, *fields)
        labels: dict[str, int] = {}
        numbers: Counter[tuple[str, bool]] = Counter()
        used, last = 0, 0
        for index, (comm, op, peer, tag, sent, begin, end) in enumerate(self.calls, 1):
            text = f"{comm}\t{op}\tfloat32"
            if text not in labels:
                labels[text] = len(labels) + 1
                at = flight_recorder.TEXTS + used
                flight_recorder.TEXT.pack_into(data, at, flight_recorder.LABEL, len(text))
                data[at + flight_recorder.TEXT.size : at + flight_recorder.TEXT.size + len(text)] = text.encode()
                used += flight_recorder.TEXT.size + len(text)
            numbers[comm, op in POINT_TO_POINT] += 1
            own_begin, own_end = self.host.local_ns(begin), 0 if end is None else self.host.local_ns(end)
            last = max(last, own_begin, own_end)
            at = flight_recorder.RING + index % capacity * flight_recorder.RECORD.size
            flight_recorder.RECORD.pack_into(
                data, at, index, own_begin, own_end, numbers[comm, op in POINT_TO_POINT], sent // 4, sent, 0,
                labels[text], peer, tag,
            )  # fmt: skip
        data[flight_recorder.BEAT * 8 : flight_recorder.BEAT * 8 + 8] = last.to_bytes(8, "little", signed=True)
        data[flight_recorder.TEXT_USED * 8 : flight_recorder.TEXT_USED * 8 + 8] = used.to_bytes(8, "little")
        if finished:
            at = flight_recorder.NOTES + flight_recorder.KINDS.index("finished") * flight_recorder.NOTE_BYTES
            flight_recorder.NOTE.pack_into(data, at, last + 1, 0)
        return data


def write_clocks(
    run_dir: Path, ranks: Sequence[Rank], times: Sequence[int], error: Callable[[], int], rtt_ns: int
) -> None:
    """Write the table of clocks, measured at the true ``times``. ``error()`` is added to each offset."""
    hosts = list(dict.fromkeys(rank.host for rank in ranks))
    first = hosts[0]
    output = HostTable(
        tuple(hosts.index(rank.host) for rank in ranks),
        tuple(host.name for host in hosts),
        tuple(f"boot of {host.name}" for host in hosts),
    )
    readings = [
        ClockReading(
            place,
            first.local_ns(t),
            host.local_ns(t) - first.local_ns(t) + (error() if place else 0),
            rtt_ns if place else 0,
        )
        for t in times
        for place, host in enumerate(hosts)
    ]
    with files.edit(run_dir / "metrics.h5", "hpcdist.metrics", 1) as file:
        table.append_clocks(file, 0, output, readings, first.wall_ns - first.local_ns(0))


@dataclass
class Invented:
    """A data-parallel run at true times: its ranks, and the (cause, effect) times of each message and collective."""

    ranks: list[Rank]
    begins: dict[int, list[int]]  # step -> when each rank entered its allreduce
    ends: dict[int, int]  # step -> when that ended for all
    messages: list[tuple[int, int, int, int]] = field(default_factory=list)  # from, to, sent, received


def invent(rng, hosts: Sequence[Host], per_host: int, steps: int, *, step_ns: int = 20_000_000) -> Invented:
    """Return a run whose steps compute, send a message around a ring, compute, and end with an allreduce."""
    world = per_host * len(hosts)
    ranks = [Rank(rank, hosts[rank // per_host], world) for rank in range(world)]
    at = [int(rng.integers(0, 1000)) for _ in ranks]
    made = Invented(ranks, {}, {})
    for step in range(1, steps + 1):
        begin = list(at)
        for rank in range(world):
            computed = at[rank] + int(rng.integers(step_ns // 10, step_ns // 2))
            ranks[rank].span("compute", "FORWARD", step, at[rank], computed)
            at[rank] = computed
        sent = list(at)
        flight = [int(rng.integers(1000, 60_000)) for _ in range(world)]
        for rank in range(world):
            to, source = (rank + 1) % world, (rank - 1) % world
            received = max(sent[source] + flight[source], sent[rank] + 500)
            ranks[rank].call("world", "isend", sent[rank], sent[rank] + 400, peer=to, tag=7, sent=4096)
            ranks[rank].call("world", "recv", sent[rank] + 450, received, peer=source, tag=7)
            ranks[rank].span("communication", "RECV_ACTIVATION", step, sent[rank], received)
            made.messages.append((source, rank, sent[source], received))
            at[rank] = received
        for rank in range(world):
            computed = at[rank] + int(rng.integers(step_ns // 10, step_ns // 2))
            ranks[rank].span("compute", "BACKWARD", step, at[rank], computed)
            at[rank] = computed
        made.begins[step] = list(at)
        made.ends[step] = max(at) + int(rng.integers(20_000, 80_000))
        for rank in range(world):
            ranks[rank].call("world", "allreduce", at[rank], made.ends[step] + 17 * rank)
            ranks[rank].span("communication", "REDUCE", step, at[rank], made.ends[step] + 17 * rank)
            at[rank] = made.ends[step] + 17 * rank
            ranks[rank].span("step", "step", step, begin[rank], at[rank])
    return made
