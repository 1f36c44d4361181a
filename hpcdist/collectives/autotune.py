"""Autotuner of the allreduce and of its halves, the reduce-scatter and the all-gather of ZeRO.

A cost model proposes candidates, a tournament selects, and a cache stores the result.

The largest size is measured first. Sizes beyond the time budget are left out. All ranks decide by the same times, so
they make the same calls.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Final

import numpy as np

from hpcdist import collectives
from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import accumulation_dtype, is_16bit_float, name_of
from hpcdist.collectives import nccl, tuning_cache
from hpcdist.collectives.cost_model import FORMULAS, Clock, MachineCosts, Topology, measure_machine, slowest_rank
from hpcdist.collectives.dispatch import AlgorithmTable, parse_algorithm
from hpcdist.collectives.reduction import REFUSALS
from hpcdist.collectives.tuning_cache import Tuning, TuningRow
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import UsageError

Candidate = Callable[[], None]

FIRST_LOOKS: Final = 2  # rounds before any candidate is dropped; the minimum of these rounds counts
HOPELESS: Final = 2.0  # a candidate is dropped above this multiple of the best first time
FEWEST_ROUNDS, MOST_ROUNDS = 3, 25
FEWEST_CALLS: Final = 1 + FIRST_LOOKS + FEWEST_ROUNDS  # of each candidate that is not dropped
SAMPLE_S: Final = 100e-6  # short calls are repeated for this time, to hide the cost of clock and barrier
MOST_REPEATS: Final = 8


class Tournament:
    """Timed comparison of candidate algorithms on ``comm``. Times are maxima over the ranks of ``everyone``."""

    def __init__(
        self, comm: Communicator, everyone: Communicator, candidates: Mapping[str, Candidate], clock: Clock
    ) -> None:
        self.comm, self.everyone, self.clock = comm, everyone, clock
        self.candidates = dict(candidates)
        self.warming_s = 0.0  # time of the first calls, which may compile kernels that a run needs anyway
        self._began = clock()

    def run(self, budget_s: float, protected: str) -> dict[str, float]:
        """Time the candidates for about ``budget_s`` seconds. Return {candidate: median seconds}.

        Candidates that take over twice the best time in the first rounds are dropped, except ``protected``.
        """
        start_s = self.clock()
        self._drop_refusals()
        self._began = self.clock()
        self.warming_s = slowest_rank(self.everyone, self._began - start_s)
        repeats = dict.fromkeys(self.candidates, 1)
        looks = [self._round(repeats, turn) for turn in range(FIRST_LOOKS)]
        first = {name: min(times[name] for times, _ in looks) for name in self.candidates}
        if looks[-1][1] > budget_s:
            return first
        best = min(first.values())
        self.candidates = {
            name: call for name, call in self.candidates.items() if first[name] <= HOPELESS * best or name == protected
        }
        repeats = {name: _repeats(first[name]) for name in self.candidates}
        rounds: list[dict[str, float]] = []
        while len(rounds) < MOST_ROUNDS:
            times, since_s = self._round(repeats, len(rounds))
            rounds.append(times)
            # Expect another round to take as long as this round on the slowest rank.
            round_s = sum(times[name] * repeats[name] for name in times)
            if len(rounds) >= FEWEST_ROUNDS and since_s + round_s > budget_s:
                break
        return {name: statistics.median(times[name] for times in rounds) for name in self.candidates}

    def _drop_refusals(self) -> None:
        refused = np.zeros(len(self.candidates))
        for index, call in enumerate(self.candidates.values()):
            try:
                call()
            except REFUSALS:
                refused[index] = 1
        self.everyone.allreduce(refused, "max")
        self.candidates = {
            name: call for (name, call), no in zip(self.candidates.items(), refused, strict=True) if not no
        }

    def _round(self, repeats: Mapping[str, int], turn: int) -> tuple[dict[str, float], float]:
        # ``turn``: seed of the order. Returns {name: seconds per call} and the seconds since the comparison began, both
        # maxima over all ranks.
        names = list(self.candidates)
        seconds = np.zeros(len(names) + 1)
        for index in np.random.default_rng(turn).permutation(len(names)):
            call, times = self.candidates[names[index]], repeats[names[index]]
            self.comm.barrier()
            start_s = self.clock()
            for _ in range(times):
                call()
            seconds[index] = (self.clock() - start_s) / times
        seconds[-1] = self.clock() - self._began
        self.everyone.allreduce(seconds, "max")
        slowest = seconds.tolist()
        return dict(zip(names, slowest[:-1], strict=True)), slowest[-1]


def _repeats(seconds: float) -> int:
    return MOST_REPEATS if seconds <= SAMPLE_S / MOST_REPEATS else max(1, round(SAMPLE_S / seconds))


NATIVE: Final = "native"
TUNING: Final = "HPCDIST_TUNING"  # "off": `auto` uses the MPI library's algorithm, and nothing is measured
ONE_NODE: Final = ("node_shared",)
BETWEEN_NODES: Final = ("hierarchical",)  # on one node, equal to the algorithm inside the node
ALLREDUCE_KIND, SHARDED_KIND = "allreduce", "sharded"
SMALLEST_BYTES, FACTOR = 64, 4
BUDGET_S: Final = 1.2  # a start takes less than 2 s, with splitting communicators and loading kernels
RESERVE: Final = 0.1  # part of the budget for the sizes between two winners
PREDICTED_WITHIN: Final = 2.0  # algorithms up to this multiple of the best prediction are measured
CLEARLY: Final = 0.95  # required fraction of the time of the MPI library, or of the previous algorithm, for a change

Allocator = Callable[[int], Array]  # number of elements -> memory of the kind that a run reduces


@dataclass(frozen=True, kw_only=True)
class TuningRequest:
    """Input of `select`: the operation, the buffers to tune for (dtype, device, largest size), and the time limit."""

    max_bytes: int
    dtype: np.dtype
    kind: str = ALLREDUCE_KIND  # ALLREDUCE_KIND, or SHARDED_KIND: a reduce-scatter and an all-gather
    buffer: str = "host"  # or "device"
    allocate: Allocator | None = None  # (n) -> n zeroed elements; None: normal memory
    budget_s: float = BUDGET_S  # time limit of the measurement

    def memory(self) -> Array:
        """Allocate a zeroed buffer of ``max_bytes`` bytes. Collective, because shared memory may be allocated."""
        size = max(1, self.max_bytes // self.dtype.itemsize)
        if self.allocate is not None:
            return self.allocate(size)
        return backend.zeros(size, self.dtype, "gpu" if self.buffer == "device" else "cpu")


def select(
    comm: Communicator,
    everyone: Communicator,
    request: TuningRequest,
    library: str,
    *,
    cached: bool = True,
    renewed: bool = False,
    clock: Clock = time.perf_counter,
    announce: Callable[[], object] = lambda: None,
) -> Tuning:
    """Return the `Tuning` (fastest algorithms on ``comm``) for ``request``, equal on all ranks of ``everyone``.

    Collective over ``everyone``, which consists of ``comm`` and other groups of the same size. ``library``: version
    string of the MPI library.
    """
    # ``cached``: a stored result may be used. ``renewed``: force a new measurement. ``announce``: call it before that.
    start_s = clock()
    if slowest_rank(everyone, comm.size) == 1:
        return Tuning(NATIVE, source="default")
    topology = _agreed(everyone, Topology.of(comm))
    dtype, buffer = name_of(request.dtype), request.buffer
    key = tuning_cache.key(everyone, topology.ranks_per_node, library, request.kind, dtype, buffer, request.max_bytes)
    note, load = "", slowest_rank(everyone, tuning_cache.load_per_processor())
    if cached and not renewed:
        stored, note = everyone.broadcast_object(tuning_cache.read(key, load) if everyone.rank == 0 else None)
        if stored is not None and usable(stored.text, request.kind, topology.nodes):
            earlier: Tuning = stored
            return earlier
    announce()
    measure = _sharded if request.kind == SHARDED_KIND else _allreduce
    rows, machine = measure(comm, everyone, request, topology, clock)
    seconds = slowest_rank(everyone, clock() - start_s)
    tuning = Tuning(
        str(AlgorithmTable.of(_limits(rows, request.kind))), tuple(rows), machine, seconds, "measured", note, load
    )
    if cached and everyone.rank == 0:
        tuning = tuning_cache.save(tuning, key)
    agreed: Tuning = everyone.broadcast_object(tuning)
    return agreed


def _agreed(everyone: Communicator, topology: Topology) -> Topology:
    node_sizes = everyone.allgather_object(topology.ranks_per_node)
    return Topology(max(node_sizes, key=lambda ranks: (len(ranks), ranks)))


def usable(text: str, kind: str, nodes: int) -> bool:
    """Return True if the algorithm or table ``text`` supports the operation ``kind`` on ``nodes`` nodes. Local."""
    if kind == SHARDED_KIND:
        return text in collectives.SHARDED_ON_GPUS or (text in collectives.SHARDED and runs_on(nodes, text))
    try:
        return all(runs_on(nodes, name) for name in parse_algorithm(text).names)
    except UsageError:
        return False


def runs_on(nodes: int, name: str) -> bool:
    """Return True if algorithm ``name`` runs on ``nodes`` nodes. Local."""
    return nodes == 1 or name not in ONE_NODE


def differs_on(nodes: int, name: str) -> bool:
    """Return True if algorithm ``name`` runs on ``nodes`` nodes, and no other algorithm is equal to it there."""
    return runs_on(nodes, name) and not (nodes == 1 and name in BETWEEN_NODES)


def _limits(rows: list[TuningRow], kind: str) -> list[tuple[int, str]]:
    between = [_halfway(row.nbytes, after.nbytes) for row, after in zip(rows, rows[1:], strict=False)]
    limits = [(limit, row.chosen) for limit, row in zip([*between, 0], rows, strict=True)]
    below = rows[0].nbytes // FACTOR
    return [(below, NATIVE), *limits] if kind == ALLREDUCE_KIND and below > SMALLEST_BYTES else limits


def _halfway(low: int, high: int) -> int:
    return max(low, 1 << (isqrt(low * high).bit_length() - 1))  # geometric mean, down to a power of two


def _sharded(
    comm: Communicator, everyone: Communicator, request: TuningRequest, topology: Topology, clock: Clock
) -> tuple[list[TuningRow], MachineCosts | None]:
    buffer = request.memory()

    def both(sharding: collectives.Sharding) -> Candidate:
        def call() -> None:
            shares = sharding.shares(comm, buffer.size, buffer.itemsize)
            sharding.reduce_scatter(comm, buffer, shares)
            sharding.all_gather(comm, buffer, shares)
            backend.synchronise(buffer)

        return call

    halves = {name: both(kind) for name, kind in collectives.SHARDED.items() if differs_on(topology.nodes, name)}
    if backend.is_device(buffer) and _on_gpus(comm, everyone):
        halves |= {name: both(kind) for name, kind in collectives.SHARDED_ON_GPUS.items()}
    tournament = Tournament(comm, everyone, halves, clock)
    measured = tournament.run(request.budget_s / 2, NATIVE)
    return [TuningRow(buffer.nbytes, {}, measured, choose(measured, NATIVE))], None


def _allreduce(
    comm: Communicator, everyone: Communicator, request: TuningRequest, topology: Topology, clock: Clock
) -> tuple[list[TuningRow], MachineCosts | None]:
    buffer = request.memory()
    machine = measure_machine(comm, everyone, topology, buffer, clock)
    sweep = SizeSweep(comm, everyone, buffer, CostModel(topology, machine, request.dtype), request.budget_s, clock)
    *smaller, greatest = sizes(request.max_bytes)
    sweep.measure([greatest, *smaller])
    sweep.measure_between()
    return sweep.rows(), machine


def sizes(max_bytes: int) -> list[int]:
    """Return a list of the buffer sizes in bytes to measure, in ascending order. The last is ``max_bytes``. Local."""
    ascending, size = [], SMALLEST_BYTES
    while size * 2 <= max_bytes:  # skip a size close to the last one
        ascending.append(size)
        size *= FACTOR
    return [*ascending, max_bytes]


def choose(measured: Mapping[str, float], previous: str | None) -> str:
    """Return the fastest algorithm of ``measured``, {name: seconds}. If nearly equal, prefer native or ``previous``."""
    best = min(measured, key=measured.__getitem__)
    for steady in (previous, NATIVE):  # `previous`: the choice for the next smaller size
        if steady is not None and steady in measured and measured[best] > CLEARLY * measured[steady]:
            best = steady
    return best


def _on_gpus(comm: Communicator, everyone: Communicator) -> list[str]:
    refused = comm.size > 1 and bool(nccl.refusal(comm))
    return [] if slowest_rank(everyone, float(refused)) else list(collectives.ON_GPUS)


@dataclass(frozen=True)
class CostModel:
    """Predictor of allreduce times for buffers of ``dtype``. ``machine``: measured costs of messages and sums."""

    topology: Topology
    machine: MachineCosts
    dtype: np.dtype

    def predicted(self, nbytes: int) -> dict[str, float]:
        """Return {algorithm: predicted seconds} for a buffer of ``nbytes`` bytes. Local."""
        wide = nbytes * accumulation_dtype(self.dtype).itemsize // self.dtype.itemsize
        sent = {name: nbytes if name == "all_to_all" and is_16bit_float(self.dtype) else wide for name in FORMULAS}
        return {
            name: formula(self.topology, sent[name]).seconds(self.machine)
            for name, formula in FORMULAS.items()
            if name in collectives.ALLREDUCE
        }


class SizeSweep:
    """Timings of allreduce algorithms over ``comm`` at several sizes of ``buffer``, within ``budget_s`` seconds."""

    def __init__(
        self, comm: Communicator, everyone: Communicator, buffer: Array, model: CostModel, budget_s: float, clock: Clock
    ) -> None:
        self.comm, self.everyone, self.buffer, self.model, self.clock = comm, everyone, buffer, model, clock
        self.budget_s, self._began = budget_s, clock()
        self._all = [*collectives.ALLREDUCE, *(_on_gpus(comm, everyone) if backend.is_device(buffer) else ())]
        self.measured: dict[int, dict[str, float]] = {}
        self._latest: dict[str, tuple[int, float]] = {}  # algorithm -> (size, time) of its last tournament

    def measure(self, nbytes: list[int]) -> None:
        """Time the algorithms for the buffer sizes ``nbytes`` in this order, with equal time per size. Collective."""
        for index, size in enumerate(nbytes):
            share_s = (self.budget_s * (1 - RESERVE) - self._spent_s()) / (len(nbytes) - index)
            names = self._affordable(size, self._candidates(size), share_s)
            if len(names) > 1:
                self._compare(size, names, share_s)

    def measure_between(self) -> None:
        """Between adjacent sizes with different fastest algorithms, time both at a middle size. Collective."""
        rows = self.rows()
        pairs = [(a, b) for a, b in zip(rows, rows[1:], strict=False) if a.chosen != b.chosen]
        for index, (low, high) in enumerate(pairs):
            middle, names = _halfway(low.nbytes, high.nbytes), list(dict.fromkeys([low.chosen, high.chosen, NATIVE]))
            share_s = (self.budget_s - self._spent_s()) / (len(pairs) - index)
            if middle > low.nbytes and self._affordable(middle, names, share_s) == names:
                self._compare(middle, names, share_s)

    def rows(self) -> list[TuningRow]:
        """Return one `TuningRow` per measured buffer size, in ascending order. Local."""
        rows: list[TuningRow] = []
        for size in sorted(self.measured):
            chosen = choose(self.measured[size], rows[-1].chosen if rows else None)
            rows.append(TuningRow(size, self.model.predicted(size), self.measured[size], chosen))
        return rows

    def _spent_s(self) -> float:
        return slowest_rank(self.everyone, self.clock() - self._began)

    def _candidates(self, nbytes: int) -> list[str]:
        predicted = self.model.predicted(nbytes)
        best = min(predicted.values())
        able = [name for name in self._all if differs_on(self.model.topology.nodes, name)]
        near = [name for name in able if predicted.get(name, best) <= PREDICTED_WITHIN * best]
        near.sort(key=lambda name: predicted.get(name, 0.0))
        winners = [row.chosen for row in self.rows()]
        return list(dict.fromkeys([NATIVE, *winners, *near]))

    def _affordable(self, nbytes: int, names: list[str], share_s: float) -> list[str]:
        affordable, cost_s = [], 0.0
        for name in names:
            cost_s += FEWEST_CALLS * self._expected_s(name, nbytes)
            if cost_s <= share_s or not self.measured:  # always measure at least one size
                affordable.append(name)
        return affordable

    def _compare(self, nbytes: int, names: list[str], share_s: float) -> None:
        part = self.buffer[: max(1, nbytes // self.buffer.itemsize)]
        tournament = Tournament(self.comm, self.everyone, {name: self._call(name, part) for name in names}, self.clock)
        first = not self.measured
        self.measured[nbytes] = tournament.run(share_s, NATIVE)
        if first:
            self.budget_s += tournament.warming_s
        self._latest |= {name: (nbytes, seconds) for name, seconds in self.measured[nbytes].items()}

    def _expected_s(self, name: str, nbytes: int) -> float:
        size, seconds = self._latest.get(name, (0, 0.0))
        predicted, before = (self.model.predicted(count) for count in (nbytes, size))
        like = name if name in predicted else max(predicted, key=predicted.__getitem__)
        return max(seconds, seconds + predicted[like] - before[like]) if seconds else predicted[like]

    def _call(self, name: str, part: Array) -> Candidate:
        def call() -> None:
            collectives.allreduce(self.comm, part, name)
            backend.synchronise(part)

        return call
