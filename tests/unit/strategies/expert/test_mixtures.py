"""Mixtures of experts on ranks: every layout matches one process, including router losses and biases."""

from dataclasses import replace

import numpy as np
import pytest

from harness.marks import cases
from harness.trainings import (
    SMALL,
    assert_rejected,
    difference,
    losses_and_norms,
    recipe_keys,
    recipe_of,
    state,
    trainer_of,
)
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError, DivergenceError, ScheduleError, StorageError
from hpcdist.models.config import EXPERT_KEYS
from hpcdist.strategies.core.grid import ProcessGrid
from hpcdist.strategies.schedule.replica_check import check_parameters, check_replicas
from hpcdist.strategies.schedule.verify.deadlock import OVER_CONTEXT
from hpcdist.strategies.schedule.verify.proof import verify
from hpcdist.training.recipe.requirements import grid_of_recipe
from hpcdist.training.run.loop import mean_validation_loss
from hpcdist.training.run.saving import CheckpointSaver

STEPS = 6
EXPERT_KEYS_OF_RECIPE = {f"model.{name}" for name in ("experts", *EXPERT_KEYS)}
MIXTURE = {**SMALL, "run.steps": STEPS, "precision.mode": "float64", "optimizer.clip_norm": 0.3} | recipe_keys(
    "layers=2 hidden=12 experts=4 expert_hidden=10 dropout=0.1 balance_loss=0.1 z_loss=0.01 global_batch=10 tied=true "
    "validation_samples=7"
)
ROUTERS = {
    "softmax": {},
    "biased": recipe_keys("router=sigmoid balance_loss=0 balance_rate=0.02 shared_experts=1 experts_per_token=3"),
    "dropping": recipe_keys("capacity_factor=0.75 experts_per_token=1 activation=swiglu"),
}
# layout -> ranks, keys of the layout, router, keys of both runs
LAYOUTS = {
    "allreduce": (3, "algorithm=ring", "softmax", ""),
    "accumulating": (2, "microbatches=3", "biased", "optimizer.name=lamb"),
    "zero1": (3, "strategy=zero1", "dropping", "optimizer.name=lars learning_rate=1"),
    "zero2": (2, "strategy=zero2 microbatches=2", "biased", "optimizer.name=sgd learning_rate=0.5"),
    "zero3": (4, "strategy=zero3 zero.parameters=2", "softmax", "optimizer.name=lamb"),
    "zero3, recomputed": (2, "strategy=zero3 recompute=true", "biased", ""),
    "servers": (2, "strategy=parameter_server parameter_server.placement=colocated", "biased", ""),
    "1f1b": (4, "pipeline=2 microbatches=2 recompute=true", "biased", "global_batch=8"),
    "zb-h1": (2, "pipeline=2 schedule=zb-h1 microbatches=3", "dropping", "global_batch=9"),
    "tensor": (2, "tensor=2", "biased", "optimizer.name=lamb"),
    "tensor by rows": (2, "tensor=2 sequence_parallel=true microbatches=2", "dropping", ""),
    "tensor x expert": (4, "tensor=2 expert=2", "softmax", "optimizer.name=lamb"),
    "tensor by rows x expert x zero1": (4, "tensor=2 expert=2 strategy=zero1 sequence_parallel=true", "biased", ""),
    "expert": (2, "expert=2 algorithm=ring", "softmax", "optimizer.name=lamb"),
    "expert of one sample less": (4, "expert=2 microbatches=3", "biased", "optimizer.name=lars learning_rate=1"),
    "expert x zero1": (4, "expert=2 strategy=zero1", "dropping", "optimizer.name=lamb"),
    "expert x zero2": (4, "expert=4 strategy=zero2 microbatches=2", "softmax", ""),
    "expert x zero3": (4, "expert=2 strategy=zero3 recompute=true", "biased", "optimizer.name=lamb"),
    "expert x 1f1b": (4, "expert=2 pipeline=2 microbatches=2", "biased", "global_batch=8"),
    "expert x zb-h1 x zero1": (
        4,
        "expert=2 pipeline=2 strategy=zero1 schedule=zb-h1 microbatches=3",
        "dropping",
        "global_batch=6",
    ),
    "interleaved": (2, "pipeline=2 schedule=interleaved chunks=2 microbatches=2", "softmax", "layers=3"),
    "context": (3, "parallel.context=3", "dropping", "data.context=26 data.packed=true document_end=46"),
    "context x expert": (  # two of the ranks have no samples in the last micro-batch
        4,
        "parallel.context=2 expert=4 strategy=zero3 microbatches=3",
        "biased",
        "data.context=26 global_batch=5",
    ),
    "context of 4, in parts of 2 x expert": (
        4,
        "parallel.context=4 expert=2 context_method=ring strategy=zero1 microbatches=3",
        "dropping",
        "data.context=37 optimizer.name=lamb",
    ),
    "data of 3 x context in groups of 3": (6, "parallel.context=2 expert=3", "softmax", "data.context=26 experts=6"),
    "all axes": (
        8,
        "parallel.context=2 expert=2 tensor=2 pipeline=2 microbatches=5 sequence_parallel=true",
        "dropping",
        "data.context=26 optimizer.name=lars learning_rate=1",
    ),
    "context x expert x zb-h1": (
        8,
        "parallel.context=2 expert=4 pipeline=2 strategy=zero1 schedule=zb-h1 microbatches=5",
        "biased",
        "data.context=26 data.packed=true document_end=46",
    ),
    "heads for tokens x expert, encoder": (
        4,
        "parallel.context=2 expert=2 context_method=all_to_all strategy=zero2 recompute=true",
        "dropping",
        "data.context=26 data.packed=true document_end=46 kind=encoder optimizer.name=lamb learning_rate=0.1",
    ),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(b"".join(b"%d plus %d is %d. " % (i % 7, i % 5, i % 7 + i % 5) for i in range(400)))
    return path


def router_of(trainer):
    """Return biases, loads of the last step and its figures. They are the same on all ranks."""
    assert trainer.router.last is not None
    return trainer.model.operations.experts.state.bias, trainer.router.loads, np.array(trainer.router.last)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.full_except("accumulating", "zero1", "zero3", "1f1b", "context", "context x expert")
def test_layouts_match_one_process(text, name):
    ranks, layout, router, more = LAYOUTS[name]
    common = {**MIXTURE, "data.path": text, **ROUTERS[router], **recipe_keys(more)}
    (single,) = run_threads(1, lambda comm: run(comm, common))
    assert single[1][-1][0] < single[1][0][0] - 0.01, "the model learns"
    for local_values in run_threads(ranks, lambda comm: run(comm, common | recipe_keys(layout))):
        check(local_values, single)


def run(comm, keys):
    """Train. Return the state, losses and norms, validation loss and router."""
    return run_of(trainer_of(comm, keys))


def run_of(trainer):
    steps = losses_and_norms(trainer, STEPS)
    result = state(trainer), steps, mean_validation_loss(trainer), router_of(trainer)
    assert not any(trainer.executor.arena._uses), "what activations lay in is given back"
    trainer.close()
    return result


def check(local_data, single):
    mine, steps, validation, router = local_data
    np.testing.assert_allclose(steps, single[1], rtol=1e-12)
    assert difference(mine, single[0]) <= 1e-12
    np.testing.assert_allclose(validation, single[2], rtol=1e-12)
    for ours, theirs in zip(router[:2], single[3][:2], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_allclose(router[2], single[3][2], rtol=1e-12)


@pytest.mark.parametrize("strategy", ["allreduce", "zero3"])
@pytest.mark.full_except("allreduce")
def test_checkpoint_moves_between_numbers_of_expert_ranks(text, tmp_path, strategy):
    """Biases and experts are restored on 1 to 4 expert ranks, also with context ranks, and on one process."""
    keys = {**MIXTURE, "data.path": text, "parallel.strategy": strategy, "data.context": 26, **ROUTERS["biased"]}
    (single,) = run_threads(1, lambda comm: losses_and_norms(trainer_of(comm, keys), STEPS))

    def first(comm):
        trainer = trainer_of(comm, keys | {"parallel.expert": 2, "parallel.context": 2 if strategy == "zero3" else 1})
        steps = losses_and_norms(trainer, 3)
        saved = CheckpointSaver(trainer, tmp_path / "checkpoints").save(3)
        return steps, saved

    steps, saved = run_threads(4, first)[0]
    layouts = (4, 4, ""), (4, 2, "tensor=2"), (2, 1, ""), (4, 4, "parallel.context=2"), (3, 1, "parallel.context=3")
    for ranks, degree, layout in (*layouts, (1, 1, "")):
        local_data = keys | {"parallel.expert": degree} | recipe_keys(layout)

        def more(comm, local_data=local_data):
            return losses_and_norms(trainer_of(comm, local_data, resume=saved), STEPS)

        for resumed in run_threads(ranks, more):
            np.testing.assert_allclose(steps + resumed, single, rtol=1e-12, err_msg=f"{degree} of {ranks}")


def test_expert_ranks_must_compute_in_the_same_order(text):
    """Ranks 2 and 3 have other samples than ranks 0 and 1, and experts that ranks 0 and 1 need."""
    keys = {**MIXTURE, "data.path": text} | recipe_keys("data.context=26 parallel.context=2 expert=4 microbatches=2")

    def body(comm):
        trainer = trainer_of(comm, keys)
        return trainer.operations, trainer.model.layout

    steps, (layout, *_) = zip(*run_threads(4, body), strict=True)
    swapped = [
        [replace(op, microbatch=1 - op.microbatch) if rank > 1 and op.kind in OVER_CONTEXT else op for op in local_data]
        for rank, local_data in enumerate(steps)
    ]
    experts = {unit: layout.range_of(unit, "expert") for unit in (1, 2)}

    def prove(lists, expert, experts):
        grid = ProcessGrid(data=2, context=2, expert=expert)
        verify(lists, grid=grid, units=dict(enumerate(layout.units.values())), microbatches=2, experts=experts)

    prove(steps, 4, experts)
    prove(swapped, 1, {})
    prove(swapped, 2, experts)
    with pytest.raises(ScheduleError, match="same order"):
        prove(swapped, 4, experts)


def test_all_tokens_to_one_expert_match_one_process(text):
    """Forced imbalance: one rank computes everything, the others wait for it, and the run is the same."""
    keys = {**MIXTURE, "data.path": text, "data.context": 26}
    keys |= recipe_keys("experts_per_token=1 balance_loss=0 balance_rate=1e-9 capacity_factor=2.5")

    def forced(comm, layout):
        trainer = trainer_of(comm, keys | recipe_keys(layout))
        trainer.model.operations.experts.state.bias[:, 3] = 100
        return run_of(trainer)

    (single,) = run_threads(1, lambda comm: forced(comm, ""))
    assert single[3][1][:, 3].sum() == single[3][1].sum() > 0
    assert single[3][2][3] == 1 - 17 / 26, "of each sample the first 17 tokens have room"
    for ranks, layout in ((2, "expert=2"), (4, "parallel.context=2 expert=4")):
        for local_values in run_threads(ranks, lambda comm, layout=layout: forced(comm, layout)):
            check(local_values, single)


def test_dropping_more_than_half_is_reported_once(text, capsys):
    keys = {**MIXTURE, "data.path": text} | recipe_keys("capacity_factor=0.25 balance_loss=0")
    run_threads(1, lambda comm: run(comm, keys))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "dropped" in line]
    assert line.startswith("hpcdist: step 1: experts dropped ") and "raise model.capacity_factor" in line
    assert float(line.split("dropped ")[1].split("%")[0]) > 50


@cases(
    "keys, message",
    ("expert=2", "parallel.expert = 2 with model.experts = 0: the model has no experts; set it to 1, or"),
    (
        "expert=3 experts=4",
        "parallel.expert = 3 with model.experts = 4: .* same number of the 4 .* one of .1, 2, 4. expert ranks",
    ),
    ("expert=2 experts=4 strategy=gossip", "with parallel.expert = 2 is not built"),
    ("expert=2 experts=4 compression=int8", "communication.compression = 'int8' with parallel.expert = 2 is not built"),
    ("expert=2 experts=4 overlap=thread algorithm=ring", "communication.overlap = 'thread' with parallel.expert = 2"),
    (
        "expert=2 experts=4 strategy=zero3 zero.parameters=2",
        "zero.parameters = 2 with parallel.expert = 2 is not built",
    ),
    ("expert=2 experts=4 precision.mode=bfloat16", "precision.mode = 'bfloat16' with parallel.expert = 2"),
    ("expert=2 experts=4 logical_shards=8", "run.logical_shards = 8 with parallel.expert = 2 is not built"),
    ("expert=2 experts=4 noise_scale_every_steps=2", "the tokens of several replicas"),
    ("experts=4 balance_rate=0.1 strategy=gossip", "model.balance_rate = 0.1 with parallel.strategy = 'gossip'"),
)
def test_invalid_expert_recipes_are_rejected(keys, message):
    assert_rejected(recipe_keys(keys), match=message)


def test_expert_degree_must_divide_the_replicas():
    recipe = recipe_of(recipe_keys("expert=2 experts=4 pipeline=2 microbatches=2 global_batch=6"))
    with pytest.raises(
        ConfigurationError,
        match=r"parallel.expert = 2 does not divide parallel.data 3 x parallel.context 1 .*6 ranks.*one of .1, 3. .a ",
    ):
        grid_of_recipe(recipe, 6)
    with pytest.raises(
        ConfigurationError, match=r"; set parallel.expert = 1 \(a checkpoint can be resumed with any number"
    ):
        grid_of_recipe(recipe, 2)


def test_mixture_can_begin_as_a_dense_model(text, tmp_path):
    """Each expert equals the dense feed-forward: the first loss is the loss of the dense run, for any layout."""
    dense = {key: value for key, value in MIXTURE.items() if key not in EXPERT_KEYS_OF_RECIPE}
    dense |= {"data.path": text, "model.feed_forward": 10, "model.dropout": 0}

    def save(comm):
        trainer = trainer_of(comm, dense)
        losses_and_norms(trainer, 2)
        return CheckpointSaver(trainer, tmp_path / "checkpoints").save(2)

    (saved,) = run_threads(1, save)
    (whole,) = run_threads(1, lambda comm: losses_and_norms(trainer_of(comm, dense | {"run.init_from": saved}), 1))
    keys = {**MIXTURE, "data.path": text, "model.dropout": 0, "run.init_from": saved}
    for ranks, layout in ((1, ""), (2, "expert=2"), (4, "tensor=2 expert=2 strategy=zero3")):
        local_data = keys | recipe_keys(layout)
        for ((loss, _),) in run_threads(
            ranks, lambda comm, local_data=local_data: losses_and_norms(trainer_of(comm, local_data), 1)
        ):
            assert loss == pytest.approx(whole[0][0], rel=1e-12)
    with pytest.raises(StorageError, match="allow-partial"):  # of another width
        run_threads(1, lambda comm: trainer_of(comm, keys | {"model.expert_hidden": 12}))


def test_diverging_experts_are_named(text):
    """Replicas of an expert are compared with each other, dense tensors over the whole data axis."""
    keys = {**MIXTURE, "data.path": text, "parallel.expert": 2}

    def body(comm):
        trainer = trainer_of(comm, keys)
        losses_and_norms(trainer, 1)
        ((replicas, store),) = trainer.exchange.other_replicas
        check_replicas(replicas, store, 1)
        if comm.rank == 3:
            store.view("1.experts.down.weight")[0, 0, 0] += 1e-9
        if comm.rank % 2:
            with pytest.raises(DivergenceError, match=r"first in tensor 1.experts.down.weight"):
                check_replicas(replicas, store, 1)
        else:
            check_replicas(replicas, store, 1)

    run_threads(4, body)


@pytest.mark.parametrize("strategy", ["allreduce", "zero3"])
@pytest.mark.full_except("allreduce")
def test_diverging_expert_biases_on_tensor_ranks_are_named(text, strategy):
    """Tensor ranks do not split these biases, which are stored next to the dense tensors."""
    keys = {**MIXTURE, "data.path": text, "parallel.tensor": 2, "parallel.expert": 2, "parallel.strategy": strategy}

    def body(comm):
        trainer = trainer_of(comm, keys)
        losses_and_norms(trainer, 1)
        check_parameters(trainer.executor, 1)
        _, store = trainer.exchange.parameter_stores
        if comm.rank == 3:
            ((_, touched),) = [
                local_data for local_data in store.tensors() if local_data[0].key == "1.experts.down.bias"
            ]
            store.range(touched)[0] += 1e-9
        if comm.rank < 2:
            check_parameters(trainer.executor, 2)
            return
        with pytest.raises(DivergenceError, match=r"step 2: .*first in tensor 1\.experts\.down\.bias"):
            check_parameters(trainer.executor, 2)

    run_threads(4, body)
