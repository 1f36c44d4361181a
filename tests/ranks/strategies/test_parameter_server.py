"""A parameter server over real ranks: in lock-step it matches one process, otherwise it learns, stops and restores."""

from itertools import product

import numpy as np
import pytest

from harness.trainings import TOLERANCE, dotted_keys, losses, losses_and_norms, recipe_keys, session_of, small_trainer
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.parameter_server.bounded_staleness import AsynchronousExchange
from hpcdist.telemetry.metrics import step_metrics
from hpcdist.training.observe.energy import EnergyRecorder
from hpcdist.training.observe.instrumentation import ConsoleProgress
from hpcdist.training.run.async_loop import AsyncTrainingLoop
from hpcdist.training.run.loop import mean_validation_loss
from hpcdist.training.run.saving import CheckpointSaver
from hpcdist.training.run.stop_requests import StopRequests

STEPS, FEW = 30, 12
KEYS = recipe_keys(
    f"hidden=32 data.context=16 steps={STEPS} global_batch=7 optimizer.warmup_steps=5 optimizer.clip_norm=0.3"
)


def _trainer(comm, folder, resume=None, **keys):
    return small_trainer(comm, folder, KEYS | dotted_keys(keys), resume)


def _losses(trainer, last=STEPS):
    return losses(trainer, last)


def _server_trainer(comm, folder, servers, placement, **keys):
    return _trainer(
        comm,
        folder,
        parallel__strategy="parameter_server",
        parameter_server__servers=servers,
        parameter_server__placement=placement,
        **keys,
    )


def _placements(size):
    dedicated = [(servers, "dedicated") for servers in range(1, size)]
    return dedicated + [(servers, "colocated") for servers in range(1, size + 1)]


def _extreme_placements(size):
    return [(size, "colocated"), *([(size // 2, "dedicated")] if size > 1 else [])]


@pytest.mark.parametrize("mode", ["float32", "float64"])
def test_rank_lock_step_equals_one_process(comm, folder, mode):
    alone = _losses(_trainer(solo(), folder, precision__mode=mode))
    assert alone[-1] < alone[0] - 0.5, "the model learns"
    for servers, placement in _placements(comm.size) if mode == "float64" else _extreme_placements(comm.size):
        together = _losses(_server_trainer(comm, folder, servers, placement, precision__mode=mode))
        np.testing.assert_allclose(together, alone, rtol=TOLERANCE[mode], err_msg=f"{servers} {placement}")


@pytest.mark.parametrize(("name", "mode"), [("adamw", "float32"), ("lamb", "float64")])
def test_rank_every_transport_equals_allreduce(comm, folder, name, mode):
    """There is clipping and two micro-batches.

    All transports match allreduce up to rounding, and each other bit for bit.
    """
    keys = {"precision__mode": mode, "optimizer__name": name, "parallel__microbatches": 2}
    replicas = _trainer(comm, folder, **keys)
    losses, weights = _losses(replicas), replicas.exchange.parameters.array
    same = set()
    for transport in ("messages", "shared", "rma"):
        served = _server_trainer(comm, folder, 0, "colocated", parameter_server__transport=transport, **keys)
        np.testing.assert_allclose(_losses(served), losses, rtol=TOLERANCE[mode], err_msg=transport)
        result = served.exchange.parameters.array
        assert np.linalg.norm(result - weights) <= TOLERANCE[mode] * np.linalg.norm(weights), transport
        same.add(result.tobytes())
        served.close()
    assert len(same) == 1


def test_rank_logical_shards_have_the_bits_of_allreduce(comm, folder):
    """The reference is one process, for all numbers of workers and servers and every transport."""
    keys = {"run__logical_shards": 6, "run__global_batch": 12, "run__steps": FEW}

    for name in ("adamw", "lamb"):
        alone = _trainer(solo(), folder, optimizer__name=name, **keys)
        expected, weights = losses_and_norms(alone, 5), alone.exchange.parameters
        for (servers, placement), transport in product(_extreme_placements(comm.size), ("messages", "shared", "rma")):
            if name == "lamb" and transport != "messages":
                continue
            keep = keys | {"optimizer__name": name, "parameter_server__transport": transport}
            together = _server_trainer(comm, folder, servers, placement, **keep)
            assert losses_and_norms(together, 5) == expected, f"{servers} {placement} {transport}"
            comm.barrier()  # a server that does not work does not wait for what others write into the copy of the node
            local_parameters = together.exchange.parameters
            assert all(
                local_parameters.range(part).tobytes() == weights.range(part).tobytes()
                for part in local_parameters.parts
            )
            together.close()


@pytest.mark.parametrize(("name", "transport"), [("adamw", "messages"), ("lamb", "shared"), ("adamw", "rma")])
@pytest.mark.full_except("adamw-messages")
def test_rank_lock_step_resumes_bit_equal(comm, folder, name, transport):
    keys = {"optimizer__name": name, "run__steps": FEW, "parameter_server__transport": transport}
    for servers, placement in _extreme_placements(comm.size):
        whole = _server_trainer(comm, folder, servers, placement, **keys)
        losses = _losses(whole, FEW)
        half = _server_trainer(comm, folder, servers, placement, **keys)
        first = _losses(half, FEW // 2)
        saved = CheckpointSaver(half, folder / f"{placement}{servers}").save(FEW // 2)
        resumed = _server_trainer(comm, folder, servers, placement, resume=saved, **keys)
        assert resumed.first_step == FEW // 2
        assert first + _losses(resumed, FEW) == losses
        comm.barrier()  # a server that shares memory with others is through before they are
        assert resumed.exchange.parameters.array.tobytes() == whole.exchange.parameters.array.tobytes()
        for ours, theirs in zip(resumed.exchange.pieces(), whole.exchange.pieces(), strict=True):
            assert ours.name == theirs.name and ours.array.tobytes() == theirs.array.tobytes()
        for trainer in (whole, half, resumed):
            trainer.close()


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
@pytest.mark.full_except("asp")
def test_rank_checkpoints_move_between_architectures(comm, folder, consistency):
    keys = {"precision__mode": "float64", "parameter_server__consistency": consistency}
    for servers, placement in _extreme_placements(comm.size):
        replicas = _trainer(comm, folder, precision__mode="float64")
        first = _losses(replicas, 5)
        saved = CheckpointSaver(replicas, folder / f"{placement}-a").save(5)
        served = _server_trainer(comm, folder, servers, placement, resume=saved, **keys)
        assert served.first_step == 5
        whole = replicas.exchange.parameters
        kept = served.exchange.parameters
        assert all(kept.range(part).tobytes() == whole.range(part).tobytes() for part in kept.parts)
        assert mean_validation_loss(served) == pytest.approx(mean_validation_loss(replicas), rel=1e-12)
        back = _trainer(
            comm, folder, precision__mode="float64", resume=CheckpointSaver(served, folder / f"{placement}-b").save(5)
        )
        np.testing.assert_allclose(
            first + _losses(back, 10), _losses(_trainer(solo(), folder, precision__mode="float64"), 10), rtol=1e-11
        )


def test_rank_bytes_of_lock_step_match_the_closed_form(comm, folder):
    """A dedicated worker pushes Psi and pulls Psi, so it sends Psi.

    If all ranks serve, a rank sends 2 Psi (p - 1) / p.
    """
    for servers, placement in _placements(comm.size):
        # Message algorithms, so that what the ranks agree on is counted too.
        trainer = _server_trainer(comm, folder, servers, placement, communication__algorithm="ring")
        with count_traffic(comm) as traffic:
            _losses(trainer, 4)
        assert not traffic.unknown
        sent, psi, p = traffic.sent_bytes / 4, 4 * trainer.model.layout.size, comm.size
        agreed = 3 * 4 * 8  # the few numbers of a step, in at most three messages
        if placement == "dedicated" and trainer.context.computes:
            assert psi <= sent <= psi + agreed
        elif placement == "dedicated":
            np.testing.assert_allclose(sent, (p - servers) * psi / servers, rtol=0.01, atol=agreed)
        elif servers == p:
            np.testing.assert_allclose(sent, 2 * psi * (p - 1) / p, rtol=0.01, atol=agreed)


def test_rank_impossible_placements_are_rejected_on_all_ranks(comm, folder):
    with pytest.raises(ConfigurationError, match=rf"^{comm.size} dedicated parameter servers in a world of"):
        _server_trainer(comm, folder, comm.size, "dedicated")


class Free:
    """Workers of a trainer under asp, each at a separate speed. They meet as the loop of a job does."""

    def __init__(self, trainer):
        assert isinstance(trainer.exchange, AsynchronousExchange)
        self.trainer, self.exchange = trainer, trainer.exchange
        self.operations = self.exchange.attended(trainer.operations)
        self.losses = []

    def run(self, last):
        self.exchange.resume()
        if self.exchange.works:
            with self.trainer.batches(last) as batches:
                for step, batch in enumerate(batches, start=self.exchange.clock + 1):
                    local_values = [(batch[0], batch[1])]
                    result = self.trainer.executor.run(self.operations, local_values, len(batch[0]), step, np.zeros(0))
                    self.losses.append(result.loss)
        exchange, workers = self.exchange, len(self.exchange.roles.workers)
        exchange.meet()
        clocks = np.zeros(workers + 1)
        if exchange.works:
            clocks[exchange.rank] = exchange.clock
        clocks[-1] = exchange.updates if exchange.rank == exchange.roles.servers[0] else 0
        exchange.agree(clocks)
        exchange.leave([int(clock) for clock in clocks[:workers]], int(clocks[-1]), 0)
        exchange.refresh()


def test_rank_asp_learns_and_restores_its_bits(comm, folder):
    for servers, placement in _placements(comm.size):
        free = Free(_server_trainer(comm, folder, servers, placement, parameter_server__consistency="asp"))
        free.run(STEPS)
        exchange, workers = free.exchange, len(free.exchange.roles.workers)
        assert exchange.clocks == [STEPS] * workers and exchange.updates == STEPS * workers
        if exchange.works:
            assert np.mean(free.losses[-5:]) < np.mean(free.losses[:5]) - 0.5, "the model learns"
        saved = CheckpointSaver(free.trainer, folder / f"asp-{placement}{servers}").save(STEPS)
        keys = {"parameter_server__consistency": "asp", "run__steps": STEPS + 5}
        resumed = _server_trainer(comm, folder, servers, placement, resume=saved, **keys)
        assert isinstance(resumed.exchange, AsynchronousExchange)
        assert resumed.exchange.state() == exchange.state()
        assert resumed.exchange.parameters.array.tobytes() == exchange.parameters.array.tobytes()
        for ours, theirs in zip(resumed.exchange.pieces(), exchange.pieces(), strict=True):
            assert ours.name == theirs.name and ours.array.tobytes() == theirs.array.tobytes()
        Free(resumed).run(STEPS + 5)
        assert resumed.exchange.clocks == [STEPS + 5] * workers


def _loop(comm, out, trainer):
    """Run a training as a job does."""
    energy, progress = EnergyRecorder(comm, trainer.recipe, None), ConsoleProgress(STEPS, 0, 1e9, shown=False)
    return AsyncTrainingLoop(session_of(comm), trainer, out, progress, {}, StopRequests(), energy).run()


@pytest.mark.parametrize("name", ["ssp", "backup"])
@pytest.mark.full_except("backup", "ssp")
def test_rank_runs_with_bound_or_backups_save_and_resume(comm, folder, name):
    """Servers meet in the middle of a run, and other servers resume from the saved state."""
    keys = {"energy__sources": "none", "checkpoint__every_steps": 5, "optimizer__name": "lamb"}
    if name == "ssp":
        keys |= {"parameter_server__consistency": "ssp", "parameter_server__staleness": 1}
        keys |= {"parameter_server__staleness_aware": "true"}
    else:
        keys |= {"parameter_server__backup_workers": 1}
    needed = 1 + (name == "backup")
    places = [(s, p) for s, p in _extreme_placements(comm.size) if comm.size - (s if p == "dedicated" else 0) >= needed]
    for servers, placement in places:
        out = folder / f"{name}-{placement}"
        if comm.rank == 0:
            out.mkdir()
        comm.barrier()
        trainer = _server_trainer(comm, folder, servers, placement, run__steps=FEW, **keys)
        outcome = _loop(comm.dup("first"), out, trainer)
        assert outcome.done == FEW and min(trainer.exchange.clocks) == max(trainer.exchange.clocks) == FEW
        assert outcome.checkpoint is not None and outcome.checkpoint.name.endswith(str(FEW))
        again = _server_trainer(
            comm, folder, comm.size, "colocated", resume=outcome.checkpoint, run__steps=FEW + 4, **keys
        )
        kept, whole = again.exchange.parameters, trainer.exchange.parameters
        assert all(kept.range(part).tobytes() == whole.range(part).tobytes() for part in whole.parts)
        assert _loop(comm.dup("second"), out, again).done == FEW + 4
        if comm.rank == 0:
            rows = step_metrics.read(out / "metrics.h5").steps
            assert rows["step"].tolist() == list(range(1, FEW + 5)) and np.isfinite(rows["loss"]).all()
            assert (rows["tokens"] > 0).all() and (rows["tokens"] <= 7 * 16).all()


def test_rank_ssp_with_bound_0_is_lock_step(comm, folder):
    for servers, placement in _extreme_placements(comm.size):
        keys = {"optimizer__name": "lamb", "run__steps": FEW}
        losses = _losses(_server_trainer(comm, folder, servers, placement, **keys), FEW)
        assert (
            _losses(_server_trainer(comm, folder, servers, placement, parameter_server__consistency="ssp", **keys), FEW)
            == losses
        )


def test_rank_as_many_backups_as_workers_are_rejected(comm, folder):
    with pytest.raises(
        ConfigurationError, match=rf"backup_workers = {comm.size}, but there are only {comm.size} workers"
    ):
        _server_trainer(comm, folder, 1, "colocated", parameter_server__backup_workers=comm.size)
