"""Each item that a resume needs: with it the run continues unchanged, and a missing item is noticed."""

import json
import math
import os
import time
from typing import Any

import numpy as np
import pytest

from harness.combinations import COLOCATED, HALF, LOCAL, POLL, SERVED, SMALL
from harness.trainings import local_bits, outcomes, trainer_of
from hpcdist.checkpoint import manifest
from hpcdist.checkpoint.directory import VAL_LOSS, Retention, loss_of
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import DataError, HpcdistError, StorageError
from hpcdist.training.observe.energy import EnergyRecorder
from hpcdist.training.run.saving import CheckpointSaver

Body = dict[str, Any]  # the JSON body of a manifest

ADAM = {"optimizer.name": "adamw"}
FLOAT16 = {"precision.mode": "float16", "precision.growth_interval": 2}
DELAYED = POLL | {"communication.delayed": "true"}
# In the middle of a period, and after the first outer step.
DILOCO = LOCAL | {"decentralised.outer_momentum": 0.9, "decentralised.outer_learning_rate": 0.7}
GOSSIP = {"parallel.strategy": "gossip", "decentralised.graph": "one_peer"}
SHARES = {"data.shares": "measured", "run.global_batch": 9}


@pytest.fixture
def keys(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # no crash in this test
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question " * 30)
    return {**SMALL, "data.path": tmp_path / "text.txt"}


def rewrite(path, change):
    """Change the manifest of a checkpoint and seal it again."""
    body = json.loads((path / manifest.FILE_NAME).read_text())
    del body["digest"]
    change(body)
    (path / manifest.FILE_NAME).write_text(manifest.seal(body))


def removal_of(*names):
    """Return a change that removes ``names`` from a manifest: ``kind:`` names pieces, other names are scalar paths."""

    def change(body):
        for name in names:
            if name.startswith("kind:"):
                kept = [piece for piece in body["pieces"] if piece["kind"] != name[5:]]
                assert len(kept) < len(body["pieces"]), f"{name} is not in the checkpoint"
                body["pieces"] = kept
                continue
            *outer, last = name.split("/")
            inside = body["scalars"]
            for key in outer:
                inside = inside[key]
            del inside[last]  # fails if it was not saved

    return change


def round_parameters(body):
    """Round the float32 master parameters to the working copies."""
    for piece in body["pieces"]:
        if piece["kind"] == "parameters":
            piece["dtype"] = "bfloat16"
            piece["flat"] = [0, 0]
            piece["digests"] = []


def change_arithmetic(body):
    """Name another summation scheme, as a later version may have."""
    assert body["scalars"]["optimizer"]["arithmetic"]
    body["scalars"]["optimizer"]["arithmetic"] = "other"


# Item -> (ranks, keys, the change that removes the item)
ITEMS = {
    "parameters": (2, {}, removal_of("kind:parameters")),
    "float32 master": (2, {"precision.mode": "bfloat16"}, round_parameters),
    "first moments": (2, {"parallel.strategy": "zero1"}, removal_of("kind:optimizer.m")),
    "second moments": (2, {"parallel.strategy": "zero3"}, removal_of("kind:optimizer.v")),
    "the optimizer's clock, and the rate": (2, ADAM, removal_of("optimizer/count")),
    "the scale of the loss": (2, FLOAT16, removal_of("loss_scale")),
    "what it has counted": (2, FLOAT16, removal_of("loss_scale/grown")),
    "the pending gradient": (2, DELAYED, removal_of("kind:gradients.pending")),
    "that it is pending": (2, DELAYED, removal_of("optimizer/pending")),
    "the outer optimizer": (2, DILOCO, removal_of("kind:optimizer.outer")),
    "one model of many replicas": (3, GOSSIP, removal_of("kind:parameters")),
    "the round of the graph": (3, GOSSIP, removal_of("optimizer/count")),
    "the cursor of samples": (2, {}, removal_of("steps")),
    "which data": (2, {}, removal_of("data")),
    "the rule of their order": (2, {}, removal_of("sample_order")),
    "shares by speed": (3, SHARES, removal_of("shares")),
    "the clock of servers": (3, SERVED, removal_of("optimizer/count")),
    "the state that servers keep": (3, COLOCATED, removal_of("kind:optimizer.m")),
    "the arithmetic of logical shards": (2, {"run.logical_shards": 8}, change_arithmetic),
}


def set_sample_shares(trainer):
    """Set fixed sample shares, which a run can repeat: they change at the second and the third batch."""
    if trainer.shares is not None:
        trainer.shares.change(1, (6, 2, 1))
        trainer.shares.change(HALF + 1, (2, 2, 5))
    return trainer


@pytest.mark.parametrize("item", ITEMS)
@pytest.mark.full_except("the optimizer's clock, and the rate")
def test_resume_continues_unchanged_and_needs_each_item(item, keys, tmp_path):
    ranks, local_data, leave_out = ITEMS[item]
    settings = {**keys, **local_data}

    def body(comm):
        trainer = set_sample_shares(trainer_of(comm, settings))
        outcomes(trainer, HALF, 0)
        path = CheckpointSaver(trainer, tmp_path / "run").save(HALF)
        return path, (outcomes(trainer, 2 * HALF, HALF), trainer.flush(), local_bits(trainer))

    def resume(comm):
        trainer = trainer_of(comm, settings, path)
        return outcomes(trainer, 2 * HALF, trainer.first_step), trainer.flush(), local_bits(trainer)

    done = run_threads(ranks, body)
    path, right = done[0][0], [one for _, one in done]
    assert run_threads(ranks, resume) == right
    rewrite(path, leave_out)
    try:
        noticed = run_threads(ranks, resume) != right
    except (HpcdistError, KeyError) as error:
        noticed = bool(str(error))
    assert noticed, "the missing item was not noticed"


@pytest.mark.parametrize("consistency", ["asp", "ssp"])
def test_parameter_server_clocks_and_versions_are_restored(consistency, keys, tmp_path):
    bound = {"parameter_server.staleness": 4} if consistency == "ssp" else {}
    settings = {**keys, **SERVED, "parameter_server.consistency": consistency, **bound}

    def save_state(comm):
        trainer = trainer_of(comm, settings)
        trainer.exchange.restore({"count": 2, "clocks": [2, 5], "updates": 7})
        return CheckpointSaver(trainer, tmp_path / "run").save(2)

    def restored_state(comm):
        exchange = trainer_of(comm, settings, path).exchange
        served = None if exchange.shard is None else (exchange.shard.updates, dict(exchange.seen))
        return exchange.clocks, exchange.updates, exchange.clock, served

    path = run_threads(3, save_state)[0]
    right = [([2, 5], 7, 2, None), ([2, 5], 7, 5, None), ([2, 5], 7, 0, (7, {0: 2, 1: 5}))]
    assert run_threads(3, restored_state) == right
    rewrite(path, removal_of("optimizer/clocks"))
    assert run_threads(3, restored_state) != right, "all workers would resume from the slowest clock"


def test_parameter_server_version_with_backup_workers_is_restored(keys, tmp_path):
    settings = {**keys, **SERVED, "parameter_server.backup_workers": 1}

    def save_state(comm):
        trainer = trainer_of(comm, settings)
        trainer.exchange.restore({"count": 4})
        return CheckpointSaver(trainer, tmp_path / "run").save(4)

    def restored_state(comm):
        exchange = trainer_of(comm, settings, path).exchange
        return exchange.clocks, exchange.updates, None if exchange.shard is None else exchange.shard.updates

    path = run_threads(4, save_state)[0]
    assert run_threads(4, restored_state) == [([4] * 3, 4, None)] * 3 + [([4] * 3, 4, 4)]
    rewrite(path, removal_of("optimizer/count"))
    with pytest.raises(StorageError, match="lacks the number of optimizer updates"):
        run_threads(4, restored_state)


def test_chosen_algorithm_is_restored(keys, tmp_path):
    path = run_threads(2, lambda comm: CheckpointSaver(trainer_of(comm, keys), tmp_path / "run").save(1))[0]
    rewrite(path, lambda body: body["scalars"].update(algorithm="recursive_doubling"))  # as after a measurement

    def restored_state(comm):
        trainer = trainer_of(comm, keys, path)
        return trainer.exchange.traits.algorithm, trainer.selection.source

    assert run_threads(2, restored_state) == [("recursive_doubling", "checkpoint")] * 2
    rewrite(path, removal_of("algorithm"))
    assert run_threads(2, restored_state) == [("native", "default")] * 2


def test_measured_pipeline_partition_is_restored(keys, tmp_path):
    """Gradient sums over other stages would be rounded differently."""
    settings = {**keys, "parallel.pipeline": 2, "parallel.microbatches": 2, "parallel.partition": "measured"}
    path = run_threads(2, lambda comm: CheckpointSaver(trainer_of(comm, settings), tmp_path / "run").save(1))[0]
    worst = [1, 3]  # only the embedding on the first rank, which no measurement would choose
    rewrite(path, lambda body: body["scalars"].update(stage_units=worst))

    def restored_state(comm):
        plan = trainer_of(comm, settings, path).plan
        assert plan is not None
        return list(plan.stage_units)

    assert run_threads(2, restored_state) == [worst] * 2
    rewrite(path, removal_of("stage_units"))
    assert worst not in run_threads(2, restored_state)


def test_changed_data_is_rejected_by_digest(keys, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(path.read_text() * 200)
    made = run_threads(2, lambda comm: CheckpointSaver(trainer_of(comm, keys), tmp_path / "run").save(1))[0]
    content = bytearray(path.read_bytes())
    content[1500] ^= 1  # 64 probes of 1,024 bytes each, 3,890 bytes apart
    path.write_bytes(content)

    def resume(**more):
        return run_threads(2, lambda comm: trainer_of(comm, keys | more, made).first_step)[0]

    with pytest.raises(DataError, match="was written by a run on other data"):
        resume()
    assert resume(**{"data.digest": "probes"}) == 1
    rewrite(made, removal_of("data_digest"))
    assert resume() == 1, "a checkpoint without a digest is accepted"


def test_energy_and_time_continue_after_resume(keys, tmp_path):
    trainer = trainer_of(solo(), keys)
    energy = EnergyRecorder(solo(), trainer.recipe, None)
    with energy.monitor, energy.monitor.window("training"):
        time.sleep(0.02)
    path = CheckpointSaver(trainer, tmp_path / "run").save(HALF, energy=energy.state())
    seconds = energy.figures(HALF)["seconds_by_phase"]["training"]
    again = EnergyRecorder(solo(), trainer.recipe, path)
    with again.monitor, again.monitor.window("training"):
        time.sleep(0.01)
    assert again.figures(2 * HALF)["seconds_by_phase"]["training"] > seconds >= 0.02
    assert again.state()["since_step"] == 0
    rewrite(path, lambda body: body["scalars"].update(energy=7))
    assert EnergyRecorder(solo(), trainer.recipe, path).state()["since_step"] == HALF
    rewrite(path, removal_of("energy"))
    assert EnergyRecorder(solo(), trainer.recipe, path).state()["since_step"] == HALF, "expected to count from here"


@pytest.mark.parametrize("forged", ({"optimizer": [1]}, {"steps": "many"}, {"steps": -3}, {"data": None}))
def test_invalid_scalars_are_rejected(keys, tmp_path, forged):
    path = CheckpointSaver(trainer_of(solo(), keys), tmp_path / "run").save(1)
    rewrite(path, lambda body: body["scalars"].update(forged))
    with pytest.raises(StorageError, match=f"the value of .scalars. is invalid: .*{next(iter(forged))}"):
        trainer_of(solo(), keys, path)


def test_best_validation_loss_is_restored(keys, tmp_path):
    def kept_checkpoints(*losses):
        directory = tmp_path / f"{losses}"
        trainer = trainer_of(solo(), {**keys, "checkpoint.keep": 1, "checkpoint.keep_best": 1})
        for step, loss in enumerate(losses, start=1):
            path = CheckpointSaver(trainer, directory).save(step, **{} if math.isnan(loss) else {VAL_LOSS: loss})
            assert loss_of(path) == loss or math.isnan(loss)
            trainer = trainer_of(solo(), {**keys, "checkpoint.keep": 1, "checkpoint.keep_best": 1}, path)
        return sorted(path.name for path in directory.glob("step-*"))

    assert kept_checkpoints(1.0, 3.0, 2.0, 2.5) == ["step-1", "step-4"]
    assert kept_checkpoints(math.nan, 3.0, 2.0, 2.5) == ["step-3", "step-4"], "a pruned checkpoint cannot be the best"
    assert Retention(1, 0, 1).kept({1: 1.0, 2: 3.0}) == {1, 2}


def test_another_data_set_is_rejected(keys, tmp_path):
    path = CheckpointSaver(trainer_of(solo(), keys), tmp_path / "run").save(1)
    (tmp_path / "other.txt").write_text("not to be or to be, that is no question " * 30)
    with pytest.raises(DataError, match="was written by a run on other data than .*other.txt") as caught:
        trainer_of(solo(), {**keys, "data.path": tmp_path / "other.txt"}, path)
    assert caught.value.exit_code == 78
    assert np.isfinite(outcomes(trainer_of(solo(), keys, path), 2, 1)[0][0])
