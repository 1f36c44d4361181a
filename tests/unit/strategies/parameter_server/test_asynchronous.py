"""Without lock-step: one update per push, meetings that every rank attends, states restored bit by bit."""

import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from harness.jobs import LIMIT_S
from harness.marks import on_threads
from harness.rank_run import RankRun, load_initial, meet, optimizer_of
from hpcdist.arrays import backend
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import NonFiniteError
from hpcdist.models.config import ModelConfig
from hpcdist.optim import optimizer as optimizers
from hpcdist.strategies import build
from hpcdist.strategies.build import server_exchange
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.parameter_server.bounded_staleness import AsynchronousExchange
from hpcdist.strategies.parameter_server.config import ParameterServerConfig
from hpcdist.strategies.parameter_server.partition import Roles

SAMPLES, STEPS = 2, 6
MODEL = ModelConfig(layers=1, hidden=32, heads=2)
PLACES = [
    (size, ParameterServerConfig(servers=servers, placement=placement, consistency="asp"))
    for size, servers, placement in [
        (1, 1, "colocated"),
        (2, 1, "dedicated"),
        (2, 2, "colocated"),
        (3, 1, "dedicated"),
        (3, 2, "dedicated"),
        (3, 1, "colocated"),
        (4, 4, "colocated"),
        (6, 2, "dedicated"),
        (5, 3, "colocated"),
    ]
]
COLOCATED = ParameterServerConfig(placement="colocated", consistency="asp")


class Run(RankRun):
    """A tiny gpt on one rank. Workers run at individual speeds and meet as the training loop does."""

    def __init__(self, comm, config, steps=STEPS, on="cpu", **keys):
        make = partial(server_exchange, config=config)
        given = {"config": MODEL, "dtype": "float32", "optimizer": optimizer_of(**keys), "total_steps": steps, "on": on}
        super().__init__(comm, make, servers=config, **given)
        assert isinstance(self.exchange, AsynchronousExchange)
        self.steps, self.operations = steps, self.exchange.attended(self.operations)
        self.meetings = []
        self.own_losses = []

    def advance(self, data):
        """Make the worker's next step on its samples."""
        clock = self.exchange.clock
        samples = backend.place(data[clock, self.comm.rank], self.context.on)
        done = self.executor.run(self.operations, [(samples[:, :-1], samples[:, 1:])], SAMPLES, clock, np.zeros(0))
        self.own_losses.append(done.loss)

    def hold(self):
        """Meet. Return True if all workers have done all their steps."""
        place = self.exchange
        meet(place)
        self.meetings.append(place.clocks)
        if min(place.clocks) == self.steps:
            place.refresh()
            return True
        place.resume()
        return False

    def train(self, data, pause=lambda rank: 0.0):
        self.exchange.resume()
        while self.exchange.works and self.exchange.clock < self.steps:
            time.sleep(pause(self.comm.rank))
            self.advance(data)
            if self.exchange.meetings.called and self.hold():
                return
        while not self.hold():
            pass


def text(rng, steps=STEPS):
    return rng.integers(0, 256, (steps, 6, SAMPLES, 9)).astype(np.uint8)


@pytest.mark.parametrize(("size", "config"), PLACES, ids=str)
def test_every_push_is_one_update_at_every_server(size, config, rng):
    data = text(rng)

    def body(comm):
        run = Run(comm, config)
        run.train(data, lambda rank: 1e-3 * rank)
        return run

    runs = run_threads(size, body)
    workers = len(runs[0].exchange.roles.workers)
    for run in runs:
        assert run.exchange.clocks == [STEPS] * workers and run.exchange.updates == STEPS * workers
        assert len(run.meetings) == len(runs[0].meetings)
        if run.exchange.shard is not None:
            assert run.exchange.shard.updates == STEPS * workers
    whole = runs[0].exchange.parameters
    for run in runs:
        store = run.exchange.parameters
        assert all(store.range(part).tobytes() == whole.range(part).tobytes() for part in store.parts), "refreshed"


def test_single_worker_matches_plain_training(rng):
    """The gradient is the mean over the worker's samples, clipped by its norm, and is not changed otherwise."""
    data = text(rng)

    def body(comm):
        run = Run(comm, replace(COLOCATED, placement="dedicated"))
        run.train(data)
        return run.own_losses, run.exchange.parameters.array.tobytes()

    def alone(comm):
        run = Run(comm, COLOCATED)
        run.train(data)
        return run.own_losses, run.exchange.parameters.array.tobytes()

    assert run_threads(2, body)[0] == run_threads(1, alone)[0]
    assert run_threads(1, lambda comm: reference(comm, data))[0] == run_threads(1, alone)[0]


@pytest.mark.full
def test_asynchronous_training_on_the_gpu_matches_the_cpu(gpu, rng):
    """Servers keep and update their part where the model computes. One worker gives a single order of updates."""
    data = text(rng)

    def body(comm, config, on):
        run = Run(comm, config, on=on)
        run.train(data)
        assert backend.is_device(run.exchange.parameters.array) == (on == "gpu")
        return run.own_losses, backend.to_host(run.exchange.parameters.array)

    for size, config in ((1, COLOCATED), (3, ParameterServerConfig(servers=2, consistency="asp"))):
        host, device = (
            run_threads(size, lambda comm, on=on, config=config: body(comm, config, on)) for on in ("cpu", "gpu")
        )
        for (losses, weights), (on_device, there) in zip(host, device, strict=True):
            np.testing.assert_allclose(on_device, losses, rtol=1e-5)
            np.testing.assert_allclose(np.linalg.norm(there - weights), 0, atol=1e-4 * np.linalg.norm(weights))


def reference(comm, data):
    """Make the same steps in lock-step on one rank."""
    run = Run(comm, COLOCATED)
    lockstep = server_exchange(run.context, replace(COLOCATED, consistency="bsp"))
    load_initial(run.context, lockstep)
    executor = build.build_executor(run.context, lockstep)
    operations = build.operations(run.context, lockstep, executor.copies, ParallelConfig(strategy="parameter_server"))
    losses = [
        executor.run(operations, [(s[:, :-1], s[:, 1:])], SAMPLES, 0, np.zeros(0)).loss for s in data[:, comm.rank]
    ]
    return losses, lockstep.parameters.array.tobytes()


def test_quick_worker_does_not_wait_for_a_slow_worker(rng):
    """The quick worker finishes all its steps before the slow worker finishes its first."""
    data = text(rng)
    finished = []

    def body(comm):
        run = Run(comm, ParameterServerConfig(consistency="asp"))
        run.exchange.resume()
        if comm.rank == 1:
            while not finished:
                time.sleep(1e-3)
        while run.exchange.works and run.exchange.clock < STEPS:
            run.advance(data)
        if comm.rank == 0:
            finished.append(run.exchange.updates)
        while not run.hold():
            pass

    run_threads(3, body)
    assert finished == [STEPS]


class Open:
    """The operations of one rank that have begun and have not ended."""

    def __init__(self):
        self.tokens = {}
        self.begun = self.pushes = 0

    def begin(self, comm, op, dtype, count, sent_bytes, peer, tag):
        self.begun += 1
        self.pushes += op == "isend" and "values" in comm
        self.tokens[self.begun] = f"{op} on {comm}"
        return self.begun

    def end(self, token):
        del self.tokens[token]


@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_worker_waiting_for_a_meeting_has_no_open_operation(placement, rng):
    data, quick, before = text(rng), Open(), []

    def body(comm):
        run = Run(comm, ParameterServerConfig(servers=1, placement=placement, consistency="asp"))
        if comm.rank == 1:
            comm.events = quick
        run.exchange.resume()
        if comm.rank == 0:
            limit = time.monotonic() + LIMIT_S
            while not before or quick.tokens or quick.begun == before[0]:  # it has told that it pushes no more
                assert time.monotonic() < limit, (before, quick.begun, quick.tokens)
                time.sleep(1e-3)
                run.exchange.serve(Operation(Kind.COLLECT))  # a colocated rank serves the other meanwhile
        while run.exchange.works and run.exchange.clock < STEPS:
            run.advance(data)
        if comm.rank == 1:
            before.append(quick.begun)
        while not run.hold():
            pass

    run_threads(2 + (placement == "dedicated"), body)


@pytest.mark.parametrize(("size", "config"), [place for place in PLACES if place[0] > 1], ids=str)
def test_call_for_a_meeting_gathers_all_workers_soon(size, config, rng):
    data, steps = text(rng, 30), 30

    def body(comm):
        run = Run(comm, config, steps)
        if comm.rank == size - 1:  # a dedicated server, or the last colocated rank
            run.exchange.meetings.ask(lambda: not run.meetings)
        run.train(data)
        return run.meetings

    meetings = run_threads(size, body)
    assert all(met == meetings[0] for met in meetings)
    assert len(meetings[0]) >= 2 and max(meetings[0][0]) < steps, "long before the end"
    assert meetings[0][-1] == [steps] * len(meetings[0][-1])


def test_finished_worker_can_still_call_a_meeting(rng):
    data, called = text(rng), threading.Event()

    def body(comm):
        run = Run(comm, ParameterServerConfig(consistency="asp"))

        def wants():
            stop_request = comm.rank == 0 and run.exchange.clock == STEPS and not called.is_set()
            if stop_request:
                called.set()
            return stop_request

        run.exchange.meetings.ask(wants)
        run.train(data, lambda rank: float(rank == 1 and run.exchange.clock == 2 and not called.wait(LIMIT_S)))
        return run.meetings

    first, *_ = run_threads(3, body)
    assert first[0][0] == STEPS and 2 <= first[0][1] < STEPS and first[-1] == [STEPS, STEPS]


def test_meeting_is_due_when_the_slowest_worker_arrives(rng):
    data, steps = text(rng, 12), 12

    def body(comm):
        run = Run(comm, ParameterServerConfig(consistency="asp"), steps)
        run.exchange.plan_rendezvous(5)
        run.train(data, lambda rank: 3e-3 * rank)
        return run.meetings

    assert 5 <= min(run_threads(3, body)[0][0]) <= 6, "each worker ends at most the step it was in"


def test_repeated_push_is_applied_once(rng):
    data = text(rng)

    def body(comm):
        run = Run(comm, ParameterServerConfig(servers=2, consistency="asp"))
        place = run.exchange
        place.resume()
        if place.works:
            run.advance(data)
            before = place.parameters.array.copy()
            place.clock -= 1
            for op in place.plan():
                if op.kind is not Kind.AGREE:
                    place.handlers[op.kind](op)
            assert place.clock == 1 and np.array_equal(before, place.parameters.array)
        run.steps = 1
        assert run.hold()
        return place.updates, place.parameters.array.tobytes()

    assert [updates for updates, _ in run_threads(3, body)] == [1, 1, 1]


@pytest.mark.parametrize(("size", "config"), [PLACES[1], PLACES[4], PLACES[2], PLACES[8]], ids=str)
def test_failed_step_leaves_no_gradient_on_the_servers(size, config, rng):
    """It is computed again to find the tensor. The servers have accepted neither of the two gradients."""
    data = text(rng)

    def body(comm, fails):
        run = Run(comm, config)
        place = run.exchange
        place.resume()
        if comm.rank == 0 and fails:
            segment = run.model.layout.segments[0]
            good = place.parameters.view(segment.key).copy()
            place.parameters.view(segment.key)[...] = np.nan
            comm.events = begun = Open()
            with pytest.raises(NonFiniteError):
                run.advance(data)
            pushed = begun.pushes
            with place.unpushed():
                under_way = [what for what in begun.tokens.values() if "values" in what]
                assert not under_way, "gradients are with the servers before they are overwritten"
                batch = [(data[0, 0][:, :-1], data[0, 0][:, 1:])]
                assert run.executor.inspect(run.operations, batch) == f"parameter {segment.key}"
            assert begun.pushes == pushed > 0
            place.parameters.view(segment.key)[...] = good
        run.train(data)
        return place.updates, run.own_losses, place.parameters.array

    for (updates, losses, values), (expected, others, same) in zip(
        run_threads(size, lambda comm: body(comm, True)), run_threads(size, lambda comm: body(comm, False)), strict=True
    ):
        assert updates == expected and np.isfinite(losses).all() and np.isfinite(values).all()
        if config.placement == "dedicated" and size == 2:  # one worker: there is one order of updates
            assert losses == others and np.array_equal(values, same)


def test_sent_bytes_of_an_asynchronous_step(rng):
    data = text(rng)

    def body(comm, config):
        run = Run(comm, config)
        with count_traffic(comm) as traffic:
            run.train(data)
        assert not traffic.unknown
        served = 0 if run.exchange.shard is None else 4 * sum(part.size for part in run.exchange.shard.parts)
        return traffic.sent_bytes, 4 * run.model.layout.size, served

    meeting = 2 * 4 * run_bytes(2)  # and `refresh`, which sends the values once more
    worker, server = run_threads(2, lambda comm: body(comm, ParameterServerConfig(consistency="asp")))
    np.testing.assert_allclose(worker[0], worker[1] * STEPS, rtol=0.01, atol=meeting)
    np.testing.assert_allclose(server[0], server[1] * (STEPS + 1), rtol=0.01, atol=meeting)
    for sent, psi, served in run_threads(4, lambda comm: body(comm, COLOCATED)):
        np.testing.assert_allclose(sent, (psi - served) * STEPS + 3 * served * (STEPS + 1), rtol=0.01, atol=meeting)


def run_bytes(size):
    """Return the bytes of notes (9 numbers of 8 bytes, at most 4 per step and peer) and of meeting agreements."""
    return STEPS * 4 * 72 * size


@pytest.mark.parametrize(("size", "config"), [PLACES[0], PLACES[4], PLACES[6]], ids=str)
@on_threads("size")
def test_restored_state_has_the_same_bits(comm, size, config, rng):
    data = text(rng)
    run = Run(comm, config)
    run.train(data, lambda rank: 2e-3 * rank)
    saved = comm.allgather_object([(p.name, p.flat, p.array.tobytes()) for p in run.exchange.pieces()])
    whole = {}
    for name, flat, raw in (piece for pieces in saved for piece in pieces):
        whole.setdefault(name, bytearray(1 << 20))[4 * flat.start : 4 * flat.stop] = raw
    fresh = Run(comm, config)
    for piece in fresh.exchange.wanted():
        piece.array[...] = np.frombuffer(bytes(whole[piece.name][4 * piece.flat.start : 4 * piece.flat.stop]), "f4")
    fresh.exchange.restore(run.exchange.state())
    assert fresh.exchange.state() == run.exchange.state()
    assert fresh.exchange.clock == run.exchange.clock
    assert fresh.exchange.parameters.array.tobytes() == run.exchange.parameters.array.tobytes()
    if run.exchange.shard is not None and fresh.exchange.shard is not None:
        assert fresh.exchange.seen == run.exchange.seen
        assert fresh.exchange.shard.updates == run.exchange.shard.updates
        for kind, store in run.exchange.shard.stores().items():
            assert fresh.exchange.shard.stores()[kind].array.tobytes() == store.array.tobytes()


def test_restore_with_other_workers_starts_at_the_slowest_clock():
    def body(comm):
        place = Run(comm, COLOCATED).exchange
        place.restore({"count": 4, "clocks": [6, 4], "updates": 10})
        return place.clock, place.clocks, place.shard.updates

    assert run_threads(3, body) == [(4, [4, 4, 4], 12)] * 3
    assert run_threads(2, body) == [(6, [6, 4], 10), (4, [6, 4], 10)]


@on_threads(4)
def test_learning_rate_follows_updates_divided_by_workers(comm):
    run = Run(comm, COLOCATED, 40)
    alone = optimizers.build(run.context.optimizer, run.model.layout, (), np.dtype("f4"), total_steps=40)
    for step in (1, 2, 3, 17, 40):
        alone.restore({"count": step})
        run.exchange.restore({"count": step})
        assert run.exchange.shard.updates == 4 * step
        assert run.exchange.shard.optimizer.learning_rate == pytest.approx(alone.learning_rate, rel=1e-12)
        assert run.exchange.learning_rate == run.exchange.shard.optimizer.learning_rate


def test_loss_of_a_repeated_batch_falls(rng):
    data = np.repeat(text(rng, 1), 40, axis=0)

    def body(comm):
        run = Run(comm, ParameterServerConfig(servers=2, placement="colocated", consistency="asp"), 40)
        run.train(data)
        return run.own_losses

    for losses in run_threads(3, body):
        assert losses[-1] < losses[0] - 1.0


SSP = ParameterServerConfig(consistency="ssp", staleness=2)
BOUNDED = [
    (3, replace(SSP, servers=1, placement="dedicated")),
    (5, replace(SSP, servers=2, placement="dedicated", staleness=1)),
    (3, replace(SSP, placement="colocated")),
    (4, replace(SSP, servers=2, placement="colocated", staleness=1)),
]


class Watched(Run):
    """Checks before each step of a worker whether all servers keep the bound. ``everybody`` are the ranks."""

    everybody: dict[int, "Watched"]
    ahead = 0

    def starts(self):
        clock = self.exchange.clock
        for run in self.everybody.values():
            if run.exchange.shard is not None:
                slowest = min(run.exchange.seen.values())
                assert clock - slowest <= run.exchange._bound, f"worker {self.comm.rank}: {clock}, {run.exchange.seen}"
                self.ahead = max(self.ahead, clock - slowest)


def run_watched(size, config, data, pause, steps=STEPS, clocks=None):
    everybody = {}

    def body(comm):
        run = everybody[comm.rank] = Watched(comm, config, steps)
        run.everybody = everybody
        if clocks is not None:
            run.exchange.restore({"count": min(clocks), "clocks": clocks, "updates": sum(clocks)})
        comm.barrier()

        def wait(rank):
            seconds = pause(run)
            run.starts()
            return seconds

        run.train(data, wait)
        return run

    return run_threads(size, body)


@pytest.mark.parametrize(("size", "config"), BOUNDED, ids=str)
def test_no_worker_exceeds_the_staleness_bound(size, config, rng):
    steps = 12
    runs = run_watched(size, config, text(rng, steps), lambda run: 5e-3 * (run.comm.rank == 0), steps)
    workers = len(runs[0].exchange.roles.workers)
    assert all(run.exchange.clocks == [steps] * workers for run in runs)
    assert max(run.ahead for run in runs[1:workers]) == config.staleness, "and that far they are"


@pytest.mark.parametrize(("size", "config"), BOUNDED, ids=str)
def test_blocked_worker_attends_a_meeting_and_waits_again(size, config, rng):
    """Worker 0 calls a meeting before its first step, when all others are at their bound."""

    def pause(run):
        place, limit = run.exchange, time.monotonic() + LIMIT_S
        if run.comm.rank == 0 and not run.meetings and place.clock == 1:
            workers = [run.everybody[worker].exchange for worker in place.roles.workers[1:]]
            while any(worker.clock < config.staleness + 2 for worker in workers):
                assert time.monotonic() < limit
                place.serve()
                time.sleep(1e-3)
            place.meetings.call()
        return 3e-3 * (run.comm.rank == 0)

    runs = run_watched(size, config, text(rng), pause)
    assert len(runs[0].meetings) >= 2
    first = runs[0].meetings[0]
    assert max(first) - min(first) <= config.staleness + 1 and max(first) < STEPS


@pytest.mark.parametrize(("size", "config"), [BOUNDED[0], BOUNDED[2]], ids=str)
def test_restored_worker_beyond_the_bound_waits(size, config, rng):
    """The clocks come from a run with a wider bound, or without a bound."""
    clocks = [5, 0, 1][: len(Roles.of(config, size).workers)]
    runs = run_watched(size, config, text(rng), lambda run: 2e-3 * (run.comm.rank > 0), clocks=clocks)
    assert all(run.exchange.clocks == [STEPS] * len(clocks) for run in runs)
    assert len(runs[0].own_losses) == STEPS - 5


def test_every_read_tensor_has_a_single_version(rng):
    """Every tensor that a worker reads was its server's version at some time."""
    data = text(rng)
    versions = {}

    def body(comm):
        run = Run(comm, ParameterServerConfig(servers=2, placement="colocated", consistency="asp"))
        segments, shard = run.model.layout.segments, run.exchange.shard
        initial = {segment.key: run.exchange.parameters.view(segment.key).tobytes() for segment in segments}
        if shard is not None:
            local_shard = [s for s in segments if any(part.intersect(s.range) == s.range for part in shard.parts)]
            for segment in local_shard:
                versions[segment.key] = {initial[segment.key]}
            step = shard.step

            def kept(*given):
                step(*given)
                for segment in local_shard:
                    versions[segment.key].add(shard.parameters.view(segment.key).tobytes())

            shard.step = kept
        comm.barrier()
        read = 0

        def pause(rank):
            nonlocal read
            for segment in segments:
                assert run.exchange.parameters.view(segment.key).tobytes() in versions[segment.key], segment.key
                read += 1
            return 1e-3 * rank

        run.train(data, pause)
        return read

    assert min(run_threads(4, body)) >= STEPS * len(versions) > 0
    assert all(len(result) > STEPS for result in versions.values())


@pytest.mark.parametrize("aware", [False, True])
def test_learning_rate_is_divided_by_the_staleness(aware, rng):
    """Worker 1 pushes three times between the read and the push of worker 0, whose gradient is then 3 updates old."""
    data = text(rng)
    config = ParameterServerConfig(consistency="asp", staleness_aware=aware)
    place = {}
    rates = []

    def body(comm):
        run = Run(comm, config, warmup_steps=0, decay="constant")
        place[comm.rank] = run.exchange
        comm.barrier()
        run.exchange.resume()
        for _ in range(3 if comm.rank == 1 else comm.rank == 0):
            limit = time.monotonic() + LIMIT_S
            while comm.rank == 0 and place[1].clock + len(rates) < 6:
                assert time.monotonic() < limit
                time.sleep(1e-3)
            run.advance(data)
            rates.append((run.exchange.staleness, run.exchange.learning_rate))
            if run.exchange.works and comm.rank == 0:
                shard = place[2].shard
                assert shard is not None and shard.optimizer.learning_rate == run.exchange.learning_rate
        run.steps = 1
        assert run.hold()

    run_threads(3, body)
    assert [staleness for staleness, _ in rates] == [0, 0, 0, 3]
    assert [rate for _, rate in rates] == pytest.approx([1e-2] * 3 + [1e-2 / 3 if aware else 1e-2])


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_layer_wise_rates_with_whole_tensors_match_one_process(name, rng):
    """Tensors are whole, so one worker with three servers matches one process."""
    data = text(rng)

    def body(comm, servers):
        run = Run(comm, ParameterServerConfig(servers=servers, consistency="asp"), name=name)
        run.train(data)
        return run.exchange.parameters.array

    three, one = run_threads(4, lambda comm: body(comm, 3))[0], run_threads(2, lambda comm: body(comm, 1))[0]
    assert np.array_equal(three, one)
