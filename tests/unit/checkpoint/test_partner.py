"""Checkpoint copies on partner ranks: after deaths at any time one generation is complete, and damage is detected."""

import itertools
import sys
import threading

import numpy as np
import pytest

from harness.inputs import FLOAT, LAYOUT, pieces_of
from harness.marks import on_threads
from hpcdist.arrays.backend import Ledger
from hpcdist.arrays.filestore import FileStore
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import split
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint import memory_copy, partner
from hpcdist.checkpoint.partner import PartnerStore, partner_ranks, recover
from hpcdist.checkpoint.restoring import messages
from hpcdist.checkpoint.restoring import reshard as redistributing
from hpcdist.checkpoint.restoring.reshard import reshard
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.comm.threads.group import RankDeath
from hpcdist.errors import RankDiedError
from hpcdist.strategies.core.exchange import pieces_of as stored


def values_after(step):
    """Return the state after ``step`` steps. The padding is zero."""
    store = FlatStore(LAYOUT, FLOAT)
    for segment in LAYOUT.segments:
        store.range(segment.range)[...] = 1000 * step + np.arange(segment.range.size)
    return store


class Run:
    """One rank of a training with a known state after each step."""

    def __init__(self, comm, ledger=None):
        self.part = split(LAYOUT.size, comm.size, 4)[comm.rank]
        self.store = FlatStore(LAYOUT, FLOAT, self.part)
        self.buddies = PartnerStore(comm, ledger)

    def keep(self, step):
        self.store.copy_from(values_after(step))
        self.buddies.keep(step, pieces_of(self.store, self.part), {"steps": step, "loss": float("nan")})
        self.store.array[...] = -1  # training continues immediately


def restore_recovered(comm, result):
    """Reshard the recovered state to the layout of ``comm``, check it, and return its step."""
    into = FlatStore(LAYOUT, FLOAT, split(LAYOUT.size, comm.size, 4)[comm.rank])
    reshard(comm, result.held, pieces_of(into, into.parts[0]) if into.parts else [])
    expected = values_after(result.step)
    assert result.scalars["steps"] == result.step and np.isnan(result.scalars["loss"])
    for part in into.parts:
        assert into.array.tobytes() == expected.range(part).tobytes()
    return result.step


@pytest.mark.parametrize("ranks", range(1, 9))
def test_partner_ranks_are_on_other_nodes(ranks):
    for cuts in itertools.product([0, 1], repeat=ranks - 1):
        ends = [*np.flatnonzero(cuts) + 1, ranks]
        nodes = [list(range(start, stop)) for start, stop in zip([0, *ends], ends, strict=False)]
        result = partner_ranks(nodes)
        node_of = {rank: index for index, node in enumerate(nodes) for rank in node}
        if len(nodes) > 1:
            assert all(node_of[rank] != node_of[keeper] for rank, keeper in enumerate(result))
        elif ranks > 1:
            assert all(keeper == (rank + 1) % ranks for rank, keeper in enumerate(result))
        kept = np.bincount(result, minlength=ranks)
        largest = max(map(len, nodes))
        if 2 * largest <= ranks or len(nodes) == 1:
            assert (kept == 1).all()
        else:
            assert kept.max() <= -(-largest // (ranks - largest))


@pytest.mark.parametrize("nodes", [None, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_recover_restores_the_newest_copy(ranks, nodes):
    def body(comm):
        run = Run(comm)
        for step in range(4):
            run.keep(step)
            assert run.buddies.checked() == ""
        return restore_recovered(comm, recover(comm, comm.rank, run.buddies.copies))

    assert run_threads(ranks, body, ranks_per_node=nodes) == [3] * ranks


@pytest.mark.parametrize("nodes", [None, 1, 2])
@on_threads(4, ranks_per_node="nodes")
def test_recover_without_a_dead_rank_or_with_a_new_rank(comm, nodes):
    run = Run(comm)
    for step in (5, 6):
        run.keep(step)
    for dead in range(comm.size):  # the others continue without the dead rank, or with a new rank in its position
        living = comm.split(None if comm.rank == dead else 0, comm.rank)
        if living is not None:
            assert restore_recovered(living, recover(living, comm.rank, run.buddies.copies)) == 6
        new = comm.rank == dead
        result = recover(comm, None if new else comm.rank, None if new else run.buddies.copies)
        assert not (new and result.held)
        assert restore_recovered(comm, result) == 6
    assert recover(comm, None, None) is None


class DiesAt:
    """Kills this thread at its line number ``count`` in the modules under test. Counts the executed lines."""

    FILES = tuple(module.__file__ for module in (partner, memory_copy, redistributing, messages))

    def __init__(self, count=None):
        self.lines, self._count = 0, count

    def __enter__(self):
        sys.settrace(self._entered)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _entered(self, frame, event, arg):
        return self._traced if frame.f_code.co_filename in self.FILES else None

    def _traced(self, frame, event, arg):
        if event == "line":
            self.lines += 1
            if self.lines == self._count:
                sys.settrace(None)
                raise RankDeath
        return self._traced


def train(comm, dies, *, steps=4, first=1):
    """Keep the state of a few steps and die in the last. Survivors return their run, and whether a rank died."""
    run = Run(comm)
    try:
        for step in range(first, first + steps):
            comm.barrier()  # like the synchronisation of a training step: all have the copies of the step before
            if step == first + steps - 1:
                with dies:
                    run.keep(step)
            else:
                run.keep(step)
        comm.barrier()
    except RankDiedError:
        return run, True
    return run, False


@pytest.mark.parametrize(("ranks", "nodes", "steps"), [(3, None, 4), (4, 2, 4), (3, 1, 3), (2, None, 1), (4, 1, 1)])
@pytest.mark.full_except("3-None-4")
def test_death_anywhere_in_keep_leaves_a_complete_generation(rng, capsys, ranks, nodes, steps):
    """Every survivor gets the newest state that all ranks have kept, or the state that was being kept."""
    lines = run_threads(ranks, lambda comm: train(comm, dies := DiesAt(), steps=steps) and dies.lines, nodes)
    came_back = set()
    for _ in range(25):
        dead = rng.choice(ranks, size=1 if nodes else int(rng.integers(1, ranks)), replace=False).tolist()
        at = {rank: int(rng.integers(1, lines[rank] + 1)) for rank in dead}

        def body(comm, at=at):
            run, died = train(comm, DiesAt(at.get(comm.rank)), steps=steps)
            assert died
            comm.revoke()
            living = comm.shrink()
            result = recover(living, comm.rank, run.buddies.copies)
            return (None if result is None else restore_recovered(living, result),)

        results = run_threads(ranks, body, nodes, fault_tolerant=True)
        assert {rank for rank, result in enumerate(results) if result is None} <= set(dead)
        left = {result[0] for result in results if result is not None}
        assert len(left) == 1 and results.count(None) >= 1
        came_back |= left
    assert capsys.readouterr().err == ""  # a torn copy is not used, so its digest reports nothing
    assert came_back <= ({steps - 1, steps} if steps > 1 else {None, steps})


def test_death_during_recovery_can_be_recovered(rng):
    """The old copies stay until the next ones are complete, so the survivors can recover again."""

    def train_with_deaths(comm, first, second):
        run, died = train(comm, DiesAt(first if comm.rank == 0 else None))
        dies = DiesAt(second if comm.rank == 2 else None)
        if died:
            comm.revoke()
        living = comm.shrink() if died else comm
        try:
            with dies:
                step = restore_recovered(living, recover(living, comm.rank, run.buddies.copies))
            living.barrier()
        except RankDiedError:
            living.revoke()
            last = living.shrink()
            step = restore_recovered(last, recover(last, comm.rank, run.buddies.copies))
        return step, dies.lines

    whole = run_threads(4, lambda comm: train_with_deaths(comm, None, None))
    assert {step for step, _ in whole} == {4}
    died = 0
    for _ in range(40):
        first, second = int(rng.integers(1, 60)), int(rng.integers(1, whole[2][1] + 1))
        results = run_threads(4, lambda comm: train_with_deaths(comm, first, second), fault_tolerant=True)  # noqa: B023
        steps = {result[0] for result in results if result is not None}
        assert results[0] is None and len(steps) == 1 and steps <= {3, 4}
        died += results[2] is None
    assert died > 20


def flip(copy, bit):
    copy.memory[bit // 8] ^= np.uint8(1 << bit % 8)


@pytest.mark.parametrize("nodes", [None, 1])
@on_threads(2, ranks_per_node="nodes")
def test_every_damaged_bit_is_detected(comm, nodes, capsys):
    run = Run(comm)
    for step in (1, 2):
        run.keep(step)
    for generation in run.buddies.copies.generations:
        copy = generation.of[comm.rank]
        for place in np.flatnonzero(digested_bytes(copy))[comm.rank :: 7]:
            for bit in (8 * place, 8 * place + 7):
                flip(copy, bit)
                assert run.buddies.checked().startswith(f"the copy of rank {comm.rank}'s state after step ")
                flip(copy, bit)
    assert run.buddies.checked() == ""


def digested_bytes(copy):
    """Return a mask of the bytes that the digest covers: not the step, the free space or the padding."""
    used = np.ones(copy.memory.size, bool)
    used[:8] = False
    names, scalars = int(copy._head[3]), int(copy._head[4])
    start = 64 + 16 * (-(-int(copy._head[1]) // 2**20))
    used[start + scalars : start + int(copy._head[2])] = False
    used[start + int(copy._head[2]) + names : copy.memory.size - copy.data.size] = False
    return used


def test_damaged_copy_is_not_used(capsys):
    def body(comm, nodes):
        run = Run(comm)
        for step in (1, 2):
            run.keep(step)
        copies = run.buddies.copies
        other = nodes is not None  # a partner has a second copy
        if comm.rank == 1:
            copies.find(2, 1).data[0] ^= 1
        assert restore_recovered(comm, recover(comm, comm.rank, copies)) == (2 if other else 1)
        if comm.rank == (2 if other else 1):
            copies.find(2 if other else 1, 1).data[0] ^= 1
        result = recover(comm, comm.rank, copies)
        assert restore_recovered(comm, result) == 1 if other else result is None

    for nodes in (None, 1):
        run_threads(3, lambda comm, nodes=nodes: body(comm, nodes), nodes)
        stderr = capsys.readouterr().err
        damaged = "the copy of rank 1's state after step 2 is damaged in memory: bytes 0 to "
        assert stderr.count(damaged) == (3 if nodes else 2)
        assert len(stderr.splitlines()) == 3


@pytest.mark.parametrize("nodes", [None, 1])
def test_memory_of_copies_is_two_states_and_counted(nodes):
    """The memory is two states, plus as much for a partner. After two steps no memory or names are added."""

    def body(comm):
        ledger = Ledger()
        run = Run(comm, ledger)
        sent = []
        for step in range(5):
            with count_traffic(comm) as traffic:
                run.keep(step)
            sent.append(traffic.sent_bytes)
            if step == 1:
                held = dict(ledger.current)
        assert ledger.current == held == ledger.peak
        names = memory_copy.CopyLayout(pieces_of(run.store, run.part), b"")
        assert held["buddy_copies"] == 2 * memory_copy.memory_bytes(*names.sizes)
        if nodes is None:
            assert held["partner_copies"] == 0 and sent[2:] == [0, 0, 0]
        else:
            assert held["partner_copies"] > names.sizes[0]
            assert sent[0] > sent[2] == sent[3] == sent[4] >= names.sizes[0]
            assert sent[0] - sent[2] >= len(names.text)
        del run
        return ledger

    for ledger in run_threads(3, body, nodes):
        assert not any(ledger.current.values())


@pytest.mark.parametrize("nodes", [None, 1])
def test_pieces_and_scalars_may_change_between_steps(rng, monkeypatch, nodes):
    """On one rank and on several, with many blocks and messages."""
    monkeypatch.setattr(memory_copy, "BLOCK_BYTES", 128)
    monkeypatch.setattr(partner, "MESSAGE_BYTES", 512)
    plans = [[(int(rng.integers(0, 3)), int(rng.integers(0, 5))) for _ in range(8)] for _ in range(3)]

    def body(comm):
        kept = PartnerStore(comm)
        for step, (kind, size) in enumerate(plans[comm.rank]):
            dtype = ("f4", "f8", "i8")[kind]
            arrays = [np.full(100 * size + number, 10 * step + comm.rank, dtype) for number in range(size)]
            pieces = [Piece.whole(dtype, f"{comm.rank}.{number}", array) for number, array in enumerate(arrays)]
            kept.keep(step, pieces, {"text": "x" * 3000 * size, "rank": comm.rank})
            for array in arrays:
                array[...] = -1
            result = recover(comm, comm.rank, kept.copies)
            assert result.step == step and result.scalars["rank"] == 0
            assert len(result.scalars["text"]) == 3000 * plans[0][step][1]
            assert [piece.name for piece in result.held] == [piece.name for piece in pieces]
            assert all((piece.array == 10 * step + comm.rank).all() for piece in result.held)
            comm.barrier()

    run_threads(3, body, nodes)


@on_threads(2)
def test_gpu_and_file_state_can_be_kept(comm, gpu, tmp_path):
    """The kept copies are equal, and only the kept part is copied to the host."""
    part = split(LAYOUT.size, comm.size, 4)[comm.rank]
    places = {"gpu": {"on": "gpu"}, "file": {"directory": tmp_path}, "memory": {}}
    stores = {
        where: (FileStore if where == "file" else FlatStore)(LAYOUT, FLOAT, part, **options)
        for where, options in places.items()
    }
    run, values = PartnerStore(comm), values_after(7).range(part)
    for store in stores.values():
        store.write(part, values)
    pieces = stored(stores, [part])
    gpu.LOG.clear()
    run.keep(7, pieces, {"steps": 7})
    thread = threading.current_thread().name
    assert gpu.LOG.nbytes(gpu.D2H, thread) == sum(p.array.nbytes for p in pieces if p.kind == "gpu")
    result = recover(comm, comm.rank, run.copies)
    assert len(result.held) == len(pieces)
    for piece in result.held:
        segment = next(segment for segment in LAYOUT.segments if segment.spec.key == piece.tensor)
        expected = values_after(7).range(piece.flat.shift(segment.range.start))
        assert piece.array.tobytes() == expected.tobytes()
