"""`hpcdist bench collectives`: measures every contender on every cell, and hands rank 0's results on as they come."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.ranges import ALIGN_BYTES, align_up
from hpcdist.arrays.sizes import in_units
from hpcdist.bench import collectives_buffers as buffers
from hpcdist.bench import collectives_contenders as sides
from hpcdist.bench.collectives_contenders import Contender
from hpcdist.bench.collectives_file import OURS, Configuration, Key
from hpcdist.bench.collectives_measure import Limits, Samples, Timing
from hpcdist.bench.collectives_plan import COLD, HOT, ORDINARY, SHARED, Cell, Wanted, cells
from hpcdist.collectives import node_shared
from hpcdist.collectives.selection import Choice
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import UsageError

Say = Callable[[str], None]
Keep = Callable[[Sequence[Configuration]], None]


@dataclass(frozen=True)
class Memory:
    """What the pools of all cells lie in, one piece of each kind, and one for results that do not fit in place.

    It also remembers what "auto" stands for, by dtype and kind of memory: runs that share it compare the same.
    """

    pieces: dict[str, np.ndarray]
    result: np.ndarray
    cache_bytes: int
    hot: bool
    chosen: dict[tuple[str, str], Choice] = field(default_factory=dict)

    def slots(self, nbytes: int) -> int:
        """Return how many buffers of ``nbytes`` take turns in a piece."""
        most = self.result.nbytes // align_up(nbytes, ALIGN_BYTES)
        return min(most, buffers.slots(nbytes, self.cache_bytes, self.result.nbytes, self.hot))


def run(
    comm: Communicator, wanted: Wanted, mpi_library: str, keep: Keep, say: Say, memory: Memory | None = None
) -> None:
    """Measure all that is ``wanted``; ``keep`` and ``say`` are called on rank 0. Collective over ``comm``.

    Buffers lie in ``memory``, which several runs may share (`take`), or in some of this run. ``keep`` gets the
    configurations of a cell when it is done. An algorithm that was named and does not run here raises
    UsageError; one that was not named is left out, and ``say`` told why.
    """
    order, notes = cells(wanted, comm.size)
    memory = memory or take(comm, wanted, notes)
    contents = {name: buffers.Contents(comm.size, dtype_of(name)) for name in wanted.dtypes}
    said: set[str] = set()

    def say_once(text: str) -> None:
        if comm.rank == 0 and text not in said:
            said.add(text)
            say(text)

    if comm.size == 1:
        notes.append("one rank: nothing is exchanged, and no bandwidth is shown")
    for note in notes:
        say_once(note)
    limits, measured = Limits(wanted.seconds, wanted.iterations, wanted.warmup, wanted.least), False
    known = _Field(comm, wanted, memory.chosen, mpi_library, say_once)
    for number, cell in enumerate(order):
        pools = _pools(memory, cell)
        taking_part = known.of(cell, pools, contents[cell.dtype])
        if not taking_part:
            continue
        measured = True
        timing = Timing(comm, taking_part, pools, contents[cell.dtype], wanted.check)
        samples = timing.run(limits, (wanted.seed, number))
        if comm.rank == 0:
            pool = pools[ORDINARY]
            cache = HOT if wanted.hot else COLD
            keep(
                [
                    _configuration(comm, cell, one, found, pool.count, cache, mpi_library)
                    for one, found in zip(taking_part, samples, strict=True)
                ]
            )
    if not measured:
        raise UsageError(
            "no algorithm runs what was asked for here, for the reasons above; choose another --op or --dtype"
        )


def _configuration(
    comm: Communicator, cell: Cell, one: Contender, found: Samples, slots: int, cache: str, mpi_library: str
) -> Configuration:
    key = Key(
        op=cell.op,
        dtype=cell.dtype,
        bytes=cell.bytes,
        ranks=comm.size,
        nodes=comm.nodes().count,
        algorithm=one.algorithm,
        buffers=one.buffers,
        cache=cache,
        implementation=OURS,
        mpi_library=mpi_library,
    )
    session = np.zeros(len(found.time_s), np.int32)
    is_reference = one.expected is None
    return Configuration(key, is_reference, slots, found.verified, found.wrong, found.time_s, found.start_s, session)


def take(comm: Communicator, wanted: Wanted, notes: list[str]) -> Memory:
    """Take memory for all that is ``wanted`` at once, and touch it. Collective over ``comm``.

    ``notes`` gets what is to be said of it. Raises UsageError where there is too little.
    """
    kinds = dict.fromkeys([ORDINARY, *wanted.buffers])
    limit = int(buffers.MEMORY_SHARE * buffers.available_bytes()) // comm.nodes().intra.size // (len(kinds) + 1)
    cache = buffers.last_level_cache_bytes()
    said = comm.allgather_object((limit, cache or buffers.UNKNOWN_CACHE_BYTES))
    limit, cache_bytes = min(one for one, _ in said), max(one for _, one in said)
    sizes = {cell.bytes for cell in cells(wanted, comm.size)[0]}  # of some operations, more than was asked for
    largest = max(sizes)
    if largest > limit:
        raise UsageError(
            f"a buffer of {in_units(largest)} does not fit: {in_units(limit)} are left for each kind of buffer of a "
            "rank on the fullest node; choose smaller --bytes, or fewer ranks on a node"
        )
    counts = {nbytes: buffers.slots(nbytes, cache_bytes, limit, wanted.hot) for nbytes in sizes}
    if not wanted.hot and any(nbytes * count <= cache_bytes for nbytes, count in counts.items()):
        notes.append("the memory left is too small for buffers beyond the last-level cache: some lie in it")
    total = max(align_up(nbytes, ALIGN_BYTES) * count for nbytes, count in counts.items())
    pieces = {ORDINARY: np.empty(total, np.uint8)}  # filled before they are used
    if SHARED in kinds:
        pieces[SHARED] = node_shared.allocate(comm, total, np.dtype(np.uint8))
    result = np.empty(total, np.uint8)
    result.fill(0)
    return Memory(pieces, result, cache_bytes, wanted.hot)


def _pools(memory: Memory, cell: Cell) -> dict[str, buffers.Pool]:
    dtype, count = dtype_of(cell.dtype), memory.slots(cell.bytes)
    return {kind: buffers.Pool(piece, memory.result, cell.size, dtype, count) for kind, piece in memory.pieces.items()}


class _Field:
    """Finds who takes part in a cell; what "auto" stands for is found once for each dtype and kind of memory."""

    def __init__(
        self, comm: Communicator, wanted: Wanted, chosen: dict[tuple[str, str], Choice], mpi_library: str, say: Say
    ) -> None:
        self._comm, self._wanted, self._chosen, self._library, self._say = comm, wanted, chosen, mpi_library, say

    def of(self, cell: Cell, pools: dict[str, buffers.Pool], contents: buffers.Contents) -> list[Contender]:
        """Return the contenders, native first and references last; none where no algorithm runs. Collective."""
        known = sides.algorithms(cell.op)
        named = [name for name in self._wanted.algorithms if name in known]
        found = []
        for name in dict.fromkeys([sides.NATIVE, *(named if self._wanted.algorithms else known)]):
            for kind in sides.kinds(name, cell.op, self._wanted.buffers):
                chosen = self._auto(cell, kind) if name == sides.AUTO else ""
                contender = sides.contender(self._comm, cell, name, kind, chosen)
                contents.fill(pools[kind].buffer(0), self._comm.rank, 0)
                reason = sides.refusal(self._comm, contender, pools[kind].buffer(0), pools[kind].result(0))
                if not reason:
                    found.append(contender)
                elif name in named:
                    raise UsageError(f"{name} does not run {cell.op} of {cell.dtype} here: {reason}")
                else:
                    self._say(f"{name} is left out of {cell.op} of {cell.dtype}: {reason}")
        return [*found, *sides.references(self._comm, cell)] if found else []

    def _auto(self, cell: Cell, kind: str) -> str:
        key = cell.dtype, kind
        if key not in self._chosen:
            dtype, most = dtype_of(cell.dtype), max(self._wanted.bytes)
            self._chosen[key] = sides.chosen(self._comm, dtype, kind, most, self._library)
            self._say(f"auto is {self._chosen[key]} for {cell.dtype} in {kind} memory")
        return self._chosen[key].at(cell.bytes)
