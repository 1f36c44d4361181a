"""A compressed parameter server over real messages: the bits of one process with all ranks, and an exact resume."""

from dataclasses import replace

import numpy as np

from harness.compressed.server import Case, Job, OneProcess, colocated, dedicated, gradients
from harness.trainings import losses, recipe_keys, state, trainer_of
from hpcdist.training.run.saving import CheckpointSaver

SETTINGS = recipe_keys(
    "layers=1 hidden=16 heads=2 data.context=8 steps=40 global_batch=12 optimizer.warmup_steps=2 "
    "strategy=parameter_server compression=int4"
)


def test_rank_compressed_server_has_the_bits_of_one_process(comm):
    for servers in (colocated(), dedicated(comm.size // 2)) if comm.size > 1 else (colocated(),):
        case = Case(comm.size, servers, "int8" if servers.placement == "colocated" else "topk")
        job, alone = Job(comm, case), OneProcess(case)
        for row in gradients(np.random.default_rng(11), case, 4):
            assert job.step(row[comm.rank])
            alone.step(row)
        job.look()
        for part in job.exchange.update.parts:
            assert np.array_equal(job.sums[-1][part.slice], alone.sums[-1][part.slice])
        if comm.rank in case.roles.workers:
            assert job.weights.tobytes() == alone.parameters.array.tobytes()
            assert job.owed.tobytes() == alone.residual[comm.rank].tobytes()
        job.exchange.close()


def test_rank_resumed_compressed_server_has_the_same_bits(comm, folder):
    keys = {**SETTINGS, "data.path": folder / "text.txt"}
    keys["parameter_server.placement"] = "dedicated" if comm.size > 1 else "colocated"
    trainer = trainer_of(comm, keys)
    losses(trainer, 2)
    resumed = trainer_of(comm, keys, CheckpointSaver(trainer, folder / "checkpoints").save(2))
    trainer = replace(trainer, first_step=2)
    actual_losses = losses(trainer, 4)
    assert actual_losses == losses(resumed, 4) and actual_losses[-1] < np.log(256)
    one, other = state(trainer), state(resumed)
    assert one.keys() == other.keys()
    assert all(values.tobytes() == other[key].tobytes() for key, values in one.items())
    for each in (trainer, resumed):
        each.close()
