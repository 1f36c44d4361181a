"""Jobs that survive the death of ranks: threads die at chosen moments, and the run ends like an undisturbed run.


A few random layouts are tested in each run of the tests. HPCDIST_TEST_LIVES=all tests all of them.
"""

import gc
import os
import threading
import weakref

import numpy as np
import pytest

from harness.marks import cases
from harness.trainings import recipe_keys, recipe_of, survive
from hpcdist.checkpoint.partner import PartnerStore
from hpcdist.checkpoint.restoring.restore import newest_complete
from hpcdist.comm.threads.group import RankDeath
from hpcdist.errors import ConfigurationError, StorageError, TooFewRanksError
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run import elastic_job, job
from hpcdist.training.run.elastic_job import refit
from hpcdist.training.run.membership import Membership, mode_of
from hpcdist.training.run.stop_requests import GROW_FILE

LAYOUTS = {
    "allreduce": {},
    "lars": {"optimizer.name": "lars"},
    "delayed": {"communication.delayed": "true", "communication.overlap": "poll", "communication.algorithm": "ring"},
    "overlapped": {"communication.overlap": "poll", "communication.algorithm": "ring"},
    "zero2 overlapped": {
        "parallel.strategy": "zero2",
        "communication.overlap": "poll",
        "communication.algorithm": "ring",
    },
    "accumulated": {"parallel.microbatches": 2},
    "logical shards": {"run.logical_shards": 6},
    "float16": {"precision.mode": "float16"},
    "zero1": {"parallel.strategy": "zero1"},
    "zero2": {"parallel.strategy": "zero2", "optimizer.name": "lamb"},
    "zero3": {"parallel.strategy": "zero3"},
    "colocated servers": {"parallel.strategy": "parameter_server", "parameter_server.placement": "colocated"},
    "dedicated server": {"parallel.strategy": "parameter_server"},
    "pipeline": {"parallel.pipeline": 2, "parallel.microbatches": 2},
    "pipeline of zero1": {"parallel.pipeline": 2, "parallel.microbatches": 2, "parallel.strategy": "zero1"},
    "tensor": {"parallel.tensor": 2},
    "float16 in a pipeline": {"parallel.pipeline": 2, "parallel.microbatches": 2, "precision.mode": "float16"},
}
EVERY = os.environ.get("HPCDIST_TEST_LIVES") == "all"
DRAWN = [*LAYOUTS] if EVERY else [*np.random.default_rng(int(os.environ["HPCDIST_TEST_SEED"])).permutation([*LAYOUTS])]
WHEN = ("begin", "exchange", "update", "save", "backward")


def moments(name):
    """Return the moments when a rank may die. A dedicated server computes nothing."""
    return WHEN[:4] if name == "dedicated server" else WHEN


def losses(steps):
    assert steps["step"].tolist() == list(range(1, len(steps["step"]) + 1))
    return steps["loss"]


@pytest.mark.parametrize("name", DRAWN if EVERY else DRAWN[:2])
@pytest.mark.full
def test_run_shrinks_and_continues(name, tmp_path, text, rng):
    precision = {} if "float16" in name else {"precision.mode": "float64"}
    keys = {**precision, "run.seed": int(rng.integers(1000)), **LAYOUTS[name]}
    calm = survive(4, tmp_path / "calm", text, keys)
    every = {"checkpoint.every_steps": 1}
    kills = [f"{rng.integers(4)}@3:{rng.choice(moments(name))}", f"{rng.integers(2)}@6:{rng.choice(moments(name))}"]
    result = survive(4, tmp_path / "killed", text, keys | every | {"chaos.kill": kills})
    assert result.steps["world"][-1] < 4, kills
    tolerance = 1e-2 if precision == {} else 1e-9
    np.testing.assert_allclose(losses(result.steps), losses(calm.steps), rtol=tolerance, err_msg=str(kills))


@pytest.mark.parametrize("name", DRAWN if EVERY else DRAWN[2:4])
@pytest.mark.full
def test_spares_replace_dead_ranks_with_the_same_bits(name, tmp_path, text, rng):
    keys = {"run.seed": int(rng.integers(1000)), **LAYOUTS[name]}
    calm = survive(4, tmp_path / "calm", text, keys)
    kills = [f"{rng.integers(4)}@{step}:{rng.choice(moments(name))}" for step in (2, 5, 8)]
    result = survive(4, tmp_path / "killed", text, keys | {"checkpoint.every_steps": 1, "chaos.kill": kills}, spares=3)
    assert result.steps["world"][-1] == 4
    np.testing.assert_array_equal(losses(result.steps), losses(calm.steps), err_msg=str(kills))


@pytest.mark.full
def test_newest_checkpoint_is_used_if_a_copy_is_lost(tmp_path, text, rng, capfd):
    keys = {"run.seed": int(rng.integers(1000)), "parallel.strategy": "zero1", "checkpoint.every_steps": 3}
    calm = survive(4, tmp_path / "calm", text, keys)
    kills = {"chaos.kill": ["1@5", "2@5"]}  # on nodes of their own, each rank keeps for the one before
    result = survive(4, tmp_path / "killed", text, keys | kills, spares=2, ranks_per_node=1, together=2)
    np.testing.assert_array_equal(losses(result.steps), losses(calm.steps))
    assert "from " + str(tmp_path / "killed" / "checkpoints" / "step-3") in capfd.readouterr().err


@pytest.mark.full
def test_job_fails_if_no_checkpoint_is_usable(tmp_path, text, monkeypatch):
    def damage_checkpoints(run_dir, comm):
        for path in (run_dir / "checkpoints").glob("step-*/manifest.json") if comm.rank == 0 else ():
            path.write_text("{}")
        return newest_complete(run_dir, comm)

    monkeypatch.setattr(elastic_job, "newest_complete", damage_checkpoints)
    keys = {"parallel.strategy": "zero1", "checkpoint.every_steps": 3, "chaos.kill": ["1@5", "2@5"]}
    with pytest.raises(StorageError, match="none of them can be used"):
        survive(4, tmp_path / "run", text, keys, spares=2, ranks_per_node=1, together=2)


@pytest.mark.full
def test_death_during_a_rebuild_rebuilds_again(tmp_path, text, rng, monkeypatch):
    keys = {"run.seed": int(rng.integers(1000)), "parallel.strategy": "zero2"}
    calm = survive(4, tmp_path / "calm", text, keys)
    once = threading.Lock()  # one rank dies
    assemble = job.assemble

    def assemble_and_die(session, recipe, origin, *more):
        if origin is not None and session.comm.rank == 2 and once.acquire(blocking=False):
            raise RankDeath
        return assemble(session, recipe, origin, *more)

    monkeypatch.setattr(job, "assemble", assemble_and_die)
    result = survive(4, tmp_path / "killed", text, keys | {"chaos.kill": ["1@4:exchange"]}, spares=2)
    assert once.locked()
    np.testing.assert_array_equal(losses(result.steps), losses(calm.steps))


@pytest.mark.full
def test_death_after_the_initial_checkpoint_was_removed(tmp_path, text, rng):
    keys = {"run.seed": int(rng.integers(1000)), "checkpoint.every_steps": 1, "checkpoint.keep": 1}
    survive(3, tmp_path / "run", text, keys | {"run.steps": 2})
    result = survive(3, tmp_path / "run", text, keys | {"run.steps": 6, "chaos.kill": ["1@5"]}, resume="auto")
    assert losses(result.steps).size == 6 and result.steps["world"][-1] == 2


@pytest.mark.full
def test_rank_without_a_place_still_provides_its_copy(tmp_path, text, rng, capfd):
    pipeline = {"parallel.pipeline": 2, "parallel.microbatches": 2, "precision.mode": "float64"}
    keys = {"run.seed": int(rng.integers(1000)), **pipeline}
    calm = survive(4, tmp_path / "calm", text, keys)
    # Of three ranks two are used; the third has the only copy of the dead one's state, on a node of its own.
    result = survive(4, tmp_path / "killed", text, keys | {"chaos.kill": ["2@5"]}, ranks_per_node=1)
    np.testing.assert_allclose(losses(result.steps), losses(calm.steps), rtol=1e-9)
    assert "on 2 ranks" in (output := capfd.readouterr().err) and "after 4 steps, from the memory" in output


@pytest.mark.parametrize(("wished", "ranks"), [(1, 3), (9, 4)])
@pytest.mark.full
def test_spares_join_if_no_process_can_be_started(wished, ranks, tmp_path, text, monkeypatch):
    def refuse_growth(team, change, _):
        team.close_up()
        return change

    def request_growth(session, recipe, origin, *more):
        if origin is None:
            grow.write_text(f"{wished}\n")
        return assemble(session, recipe, origin, *more)

    keys, assemble, grow = {"precision.mode": "float64"}, job.assemble, tmp_path / "run" / GROW_FILE
    calm = survive(2, tmp_path / "calm", text, keys)
    monkeypatch.setattr(Membership, "fill", refuse_growth)
    monkeypatch.setattr(job, "assemble", request_growth)
    result = survive(2, tmp_path / "run", text, keys, spares=2)
    np.testing.assert_allclose(losses(result.steps), losses(calm.steps), rtol=1e-9)
    assert result.steps["world"].tolist() == [2] + [ranks] * 9, "it was asked for once"
    assert not grow.exists()


def test_run_with_too_few_ranks_left_raises(tmp_path, text):
    keys = {"survival.least_ranks": 2, "chaos.kill": ["1@3"]}
    with pytest.raises(TooFewRanksError, match="survival.least_ranks = 2"):
        survive(2, tmp_path / "run", text, keys)


@pytest.mark.full
def test_metrics_record_the_lives(tmp_path, text):
    result = survive(3, tmp_path / "run", text, {"chaos.kill": ["0@4:update"]})
    assert result.steps["session"].tolist() == [0] * 4 + [1] * 6
    assert result.steps["world"].tolist() == [3] * 4 + [2] * 6
    assert np.isnan(result.steps["compute_s"][:4]).any(axis=1).all(), "who died can say no more"
    assert np.isfinite(result.steps["compute_s"][4:, :2]).all()


@cases(
    "keys, output",
    ({"parallel.strategy": "gossip"}, "gossip"),
    ({"parallel.strategy": "parameter_server", "parameter_server.consistency": "asp"}, "asp"),
    ({"parallel.strategy": "parameter_server", "parameter_server.transport": "rma"}, "transport"),
)
def test_recipes_without_survival_support_are_rejected(keys, output):
    recipe = recipe_of(keys)
    with pytest.raises(ConfigurationError, match=output):
        recipe.check_world(0, **{"--survive": "shrink", "--spares": 0})


def test_replacement_processes_on_gpus_are_rejected():
    recipe = recipes.load(None, ["run.device=gpu"], {}).recipe
    recipe.check_world(0, **{"--survive": "replace", "--spares": 1})
    with pytest.raises(ConfigurationError, match="--spares"):
        recipe.check_world(0, **{"--survive": "replace", "--spares": 0})


@cases(
    "keys, ranks, expected",
    ({}, 3, (3, 1, 1)),
    ({"parallel.data": 4}, 3, (3, 1, 1)),
    ({"run.global_batch": 2}, 3, (2, 1, 1)),
    (recipe_keys("pipeline=2 microbatches=4"), 7, (3, 2, 1)),
    (recipe_keys("pipeline=4 microbatches=4 schedule=zb-h1"), 3, (1, 3, 1)),
    (recipe_keys("pipeline=2 microbatches=2 chunks=2 schedule=interleaved"), 1, (1, 1, 1)),
    (recipe_keys("tensor=2 sequence_parallel=true"), 1, (1, 1, 1)),
    (recipe_keys("strategy=zero2 zero.optimizer=2 zero.gradients=2"), 3, (2, 1, 1)),
)
def test_refit_finds_a_layout_for_any_number_of_ranks(keys, ranks, expected):
    recipe = recipe_of(keys)
    result = refit(recipe, ranks)
    assert result is not None
    parallel, used = result[0].parallel, result[1]
    data = used // (parallel.pipeline * parallel.tensor)
    assert (data, parallel.pipeline, parallel.tensor) == expected
    assert result[0].run == recipe.run


def test_refit_returns_none_without_a_worker():
    recipe = recipes.load(None, ["parallel.strategy=parameter_server", "parameter_server.servers=2"], {}).recipe
    assert refit(recipe, 2) is None
    assert refit(recipe, 3) is not None


@pytest.mark.parametrize("environment", [{"HPCDIST_SURVIVE": "yes"}, {"HPCDIST_SPARES": "1"}, {"HPCDIST_SPARES": "-1"}])
def test_invalid_survival_mode_is_rejected(environment):
    with pytest.raises(ConfigurationError, match="HPCDIST_S"):
        mode_of(environment)


def test_survival_mode_comes_from_the_launcher():
    assert mode_of({}) == ("", 0)
    assert mode_of({"HPCDIST_SURVIVE": "replace", "HPCDIST_SPARES": "2"}) == ("replace", 2)


@pytest.mark.full
def test_objects_of_an_ended_life_are_freed(tmp_path, text, monkeypatch):
    mine = threading.local()
    assemble = job.assemble
    seen = []

    def watch_trainer(session, recipe, origin, *more):
        earlier = vars(mine).setdefault("trainers", [])
        seen.extend([0] * len(earlier))
        assert not any(one() is not None for one in earlier), "a trainer of a life that ended is referred to"
        trainer = assemble(session, recipe, origin, *more)
        earlier.append(weakref.ref(trainer))
        return trainer

    remembered = []
    recall, finish = elastic_job.recover_newest, job.TrainingJob.finish

    def remember(*arguments):
        result = recall(*arguments)
        remembered.extend([weakref.ref(result)] if result is not None else [])
        return result

    def finish_and_check(*arguments):
        gc.collect()
        assert not any(one() is not None for one in remembered), "a state of before is referred to"
        return finish(*arguments)

    monkeypatch.setattr(job, "assemble", watch_trainer)
    monkeypatch.setattr(elastic_job, "recover_newest", remember)
    monkeypatch.setattr(job.TrainingJob, "finish", finish_and_check)
    kills = [f"{rank}@{rank + 2}:{when}" for rank, when in enumerate(WHEN[:4])]
    survive(4, tmp_path / "run", text, {"parallel.strategy": "zero1", "chaos.kill": kills}, spares=4)
    assert seen and remembered, "nobody was rebuilt"


def test_stored_copies_are_verified_by_their_digests(tmp_path, text, monkeypatch, capfd):
    keep = PartnerStore.keep

    def damage_copy(self, step, *of):
        keep(self, step, *of)
        if step == 4 and self.copies.rank == 1:
            self.copies.find(4, 1).data[5] ^= 1

    monkeypatch.setattr(PartnerStore, "keep", damage_copy)
    keys = {"parallel.strategy": "zero1", "survival.every_steps": 4, "survival.check_every_steps": 3, "run.steps": 7}
    survive(2, tmp_path / "run", text, keys)
    messages = [line for line in capfd.readouterr().err.splitlines() if "memory of rank" in line]
    assert len(messages) == 1 and "rank 1" in messages[0] and "step 4" in messages[0]
