"""What a resume needs, one thing at a time: with it the run goes on as it would have, without it that is noticed."""

import json
import math
import os
import time
from typing import Any

import numpy as np
import pytest

from harness.combinations import COLOCATED, HALF, LOCAL, POLL, SERVED, SMALL
from harness.trainings import bits, outcomes, trainer_of
from hpcdist.checkpoint.directory import VAL_LOSS, Retention, loss_of
from hpcdist.checkpoint.format import manifest
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import DataError, HpcdistError, StorageError
from hpcdist.training.observe.energy import EnergyRecorder
from hpcdist.training.run.saving import CheckpointSaver

Body = dict[str, Any]  # that of a manifest

ADAM = {"optimizer.name": "adamw"}
FLOAT16 = {"precision.mode": "float16", "precision.growth_interval": 2}
DELAYED = POLL | {"communication.delayed": "true"}
# In the middle of a period, and behind the first outer step.
DILOCO = LOCAL | {"decentralised.outer_momentum": 0.9, "decentralised.outer_learning_rate": 0.7}
GOSSIP = {"parallel.strategy": "gossip", "decentralised.graph": "one_peer"}
SHARES = {"data.shares": "measured", "run.global_batch": 9}


@pytest.fixture
def keys(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # nothing crashes here
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question " * 30)
    return {**SMALL, "data.path": tmp_path / "text.txt"}


def rewrite(path, change):
    """Change the manifest of a checkpoint, as whoever wrote it would have."""
    body = json.loads((path / manifest.FILE_NAME).read_text())
    del body["digest"]
    change(body)
    (path / manifest.FILE_NAME).write_text(manifest.seal(body))


def without(*names):
    """Leave something out: ``kind:`` of pieces, else a scalar, by its path."""

    def change(body):
        for name in names:
            if name.startswith("kind:"):
                kept = [piece for piece in body["pieces"] if piece["kind"] != name[5:]]
                assert len(kept) < len(body["pieces"]), f"{name} is not saved at all"
                body["pieces"] = kept
                continue
            *outer, last = name.split("/")
            inside = body["scalars"]
            for key in outer:
                inside = inside[key]
            del inside[last]  # it was there

    return change


def rounded(body):
    """Keep of the float32 master what the working copies have."""
    for piece in body["pieces"]:
        if piece["kind"] == "parameters":
            piece["dtype"] = "bfloat16"
            piece["flat"] = [0, 0]
            piece["digests"] = []


def other_arithmetic(body):
    """Such as a later version may have."""
    assert body["scalars"]["optimizer"]["arithmetic"]
    body["scalars"]["optimizer"]["arithmetic"] = "other"


# What is needed -> (ranks, keys, what the mutation leaves out)
ITEMS = {
    "parameters": (2, {}, without("kind:parameters")),
    "float32 master": (2, {"precision.mode": "bfloat16"}, rounded),
    "first moments": (2, {"parallel.strategy": "zero1"}, without("kind:optimizer.m")),
    "second moments": (2, {"parallel.strategy": "zero3"}, without("kind:optimizer.v")),
    "the optimizer's clock, and the rate": (2, ADAM, without("optimizer/count")),
    "the scale of the loss": (2, FLOAT16, without("loss_scale")),
    "what it has counted": (2, FLOAT16, without("loss_scale/grown")),
    "the pending gradient": (2, DELAYED, without("kind:gradients.pending")),
    "that it is pending": (2, DELAYED, without("optimizer/pending")),
    "the outer optimizer": (2, DILOCO, without("kind:optimizer.outer")),
    "one model of many replicas": (3, GOSSIP, without("kind:parameters")),
    "the round of the graph": (3, GOSSIP, without("optimizer/count")),
    "the cursor of samples": (2, {}, without("steps")),
    "which data": (2, {}, without("data")),
    "the rule of their order": (2, {}, without("sample_order")),
    "shares by speed": (3, SHARES, without("shares")),
    "the clock of servers": (3, SERVED, without("optimizer/count")),
    "the state that servers keep": (3, COLOCATED, without("kind:optimizer.m")),
    "the arithmetic of logical shards": (2, {"run.logical_shards": 8}, other_arithmetic),
}


def prepared(trainer):
    """Shares that no measurement has decided, so that they can be repeated: others from the second and third batch."""
    if trainer.shares is not None:
        trainer.shares.change(1, (6, 2, 1))
        trainer.shares.change(HALF + 1, (2, 2, 5))
    return trainer


@pytest.mark.parametrize("item", ITEMS)
@pytest.mark.full_except("the optimizer's clock, and the rate")
def test_a_run_goes_on_as_it_would_have(item, keys, tmp_path):
    ranks, own, leave_out = ITEMS[item]
    settings = {**keys, **own}

    def body(comm):
        trainer = prepared(trainer_of(comm, settings))
        outcomes(trainer, HALF, 0)
        path = CheckpointSaver(trainer, tmp_path / "run").save(HALF)
        return path, (outcomes(trainer, 2 * HALF, HALF), trainer.flush(), bits(trainer))

    def resumed(comm):
        trainer = trainer_of(comm, settings, path)
        return outcomes(trainer, 2 * HALF, trainer.first_step), trainer.flush(), bits(trainer)

    done = run_threads(ranks, body)
    path, right = done[0][0], [one for _, one in done]
    assert run_threads(ranks, resumed) == right
    rewrite(path, leave_out)
    try:
        noticed = run_threads(ranks, resumed) != right
    except (HpcdistError, KeyError) as error:
        noticed = bool(str(error))
    assert noticed, "left out, and nobody sees it"


@pytest.mark.parametrize("consistency", ["asp", "ssp"])
def test_clocks_and_versions_of_servers_are_kept(consistency, keys, tmp_path):
    bound = {"parameter_server.staleness": 4} if consistency == "ssp" else {}
    settings = {**keys, **SERVED, "parameter_server.consistency": consistency, **bound}

    def saved(comm):
        trainer = trainer_of(comm, settings)
        trainer.exchange.restore({"count": 2, "clocks": [2, 5], "updates": 7})
        return CheckpointSaver(trainer, tmp_path / "run").save(2)

    def found(comm):
        exchange = trainer_of(comm, settings, path).exchange
        served = None if exchange.shard is None else (exchange.shard.updates, dict(exchange.seen))
        return exchange.clocks, exchange.updates, exchange.clock, served

    path = run_threads(3, saved)[0]
    right = [([2, 5], 7, 2, None), ([2, 5], 7, 5, None), ([2, 5], 7, 0, (7, {0: 2, 1: 5}))]
    assert run_threads(3, found) == right
    rewrite(path, without("optimizer/clocks"))
    assert run_threads(3, found) != right, "they would all go on from the slowest"


def test_the_version_of_servers_with_backup_workers(keys, tmp_path):
    settings = {**keys, **SERVED, "parameter_server.backup_workers": 1}

    def saved(comm):
        trainer = trainer_of(comm, settings)
        trainer.exchange.restore({"count": 4})
        return CheckpointSaver(trainer, tmp_path / "run").save(4)

    def found(comm):
        exchange = trainer_of(comm, settings, path).exchange
        return exchange.clocks, exchange.updates, None if exchange.shard is None else exchange.shard.updates

    path = run_threads(4, saved)[0]
    assert run_threads(4, found) == [([4] * 3, 4, None)] * 3 + [([4] * 3, 4, 4)]
    rewrite(path, without("optimizer/count"))
    with pytest.raises(StorageError, match="does not say how many updates"):
        run_threads(4, found)


def test_the_algorithm_that_was_chosen_is_kept(keys, tmp_path):
    path = run_threads(2, lambda comm: CheckpointSaver(trainer_of(comm, keys), tmp_path / "run").save(1))[0]
    rewrite(path, lambda body: body["scalars"].update(algorithm="recursive_doubling"))  # as a measurement would have

    def found(comm):
        trainer = trainer_of(comm, keys, path)
        return trainer.exchange.algorithm, trainer.selection.source

    assert run_threads(2, found) == [("recursive_doubling", "checkpoint")] * 2
    rewrite(path, without("algorithm"))
    assert run_threads(2, found) == [("native", "default")] * 2


def test_the_measured_cut_of_the_stages_is_kept(keys, tmp_path):
    """Sums of gradients over other stages would round differently."""
    settings = {**keys, "parallel.pipeline": 2, "parallel.microbatches": 2, "parallel.partition": "measured"}
    path = run_threads(2, lambda comm: CheckpointSaver(trainer_of(comm, settings), tmp_path / "run").save(1))[0]
    worst = [1, 3]  # nothing but the embedding on the first rank: no measurement says so
    rewrite(path, lambda body: body["scalars"].update(stage_units=worst))

    def found(comm):
        plan = trainer_of(comm, settings, path).plan
        assert plan is not None
        return list(plan.stage_units)

    assert run_threads(2, found) == [worst] * 2
    rewrite(path, without("stage_units"))
    assert worst not in run_threads(2, found)


def test_data_that_changed_between_the_probes_is_refused(keys, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(path.read_text() * 200)
    made = run_threads(2, lambda comm: CheckpointSaver(trainer_of(comm, keys), tmp_path / "run").save(1))[0]
    content = bytearray(path.read_bytes())
    content[1500] ^= 1  # 64 probes of 1,024 bytes begin 3,890 bytes apart
    path.write_bytes(content)

    def resumed(**more):
        return run_threads(2, lambda comm: trainer_of(comm, keys | more, made).first_step)[0]

    with pytest.raises(DataError, match="was written by a run on other data"):
        resumed()
    assert resumed(**{"data.digest": "probes"}) == 1
    rewrite(made, without("data_digest"))
    assert resumed() == 1, "it was made before there were digests"


def test_energy_and_time_go_on_counting(keys, tmp_path):
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
    rewrite(path, without("energy"))
    assert EnergyRecorder(solo(), trainer.recipe, path).state()["since_step"] == HALF, "then it counts from here"


@pytest.mark.parametrize("forged", ({"optimizer": [1]}, {"steps": "many"}, {"steps": -3}, {"data": None}))
def test_numbers_that_no_training_writes_are_refused(keys, tmp_path, forged):
    path = CheckpointSaver(trainer_of(solo(), keys), tmp_path / "run").save(1)
    rewrite(path, lambda body: body["scalars"].update(forged))
    with pytest.raises(StorageError, match=f"is not valid: of its scalars, .*{next(iter(forged))}"):
        trainer_of(solo(), keys, path)


def test_the_best_validation_loss_is_kept(keys, tmp_path):
    def stay(*losses):
        directory = tmp_path / f"{losses}"
        trainer = trainer_of(solo(), {**keys, "checkpoint.keep": 1, "checkpoint.keep_best": 1})
        for step, loss in enumerate(losses, start=1):
            path = CheckpointSaver(trainer, directory).save(step, **{} if math.isnan(loss) else {VAL_LOSS: loss})
            assert loss_of(path) == loss or math.isnan(loss)
            trainer = trainer_of(solo(), {**keys, "checkpoint.keep": 1, "checkpoint.keep_best": 1}, path)
        return sorted(path.name for path in directory.glob("step-*"))

    assert stay(1.0, 3.0, 2.0, 2.5) == ["step-1", "step-4"]
    assert stay(math.nan, 3.0, 2.0, 2.5) == ["step-3", "step-4"], "what is not kept is not the best"
    assert Retention(1, 0, 1).kept({1: 1.0, 2: 3.0}) == {1, 2}


def test_another_data_set_is_refused(keys, tmp_path):
    path = CheckpointSaver(trainer_of(solo(), keys), tmp_path / "run").save(1)
    (tmp_path / "other.txt").write_text("not to be or to be, that is no question " * 30)
    with pytest.raises(DataError, match="was written by a run on other data than .*other.txt") as caught:
        trainer_of(solo(), {**keys, "data.path": tmp_path / "other.txt"}, path)
    assert caught.value.exit_code == 78
    assert np.isfinite(outcomes(trainer_of(solo(), keys, path), 2, 1)[0][0])
