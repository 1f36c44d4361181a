"""Wrapped JAX models: gradients, copied and kept memory, bad input, and training compared with plain JAX and optax."""

import threading

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("optax")

import jax.numpy as jnp

from harness.marks import cases
from harness.models import jax as models
from harness.models.passes import Passes
from hpcdist.adapters.jax import model as adapter
from hpcdist.adapters.jax import parameters
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import ConfigurationError, DataError, MissingCapabilityError, UsageError
from hpcdist.models.arena import Arena
from hpcdist.models.stage import Draw

pytestmark = pytest.mark.reference


@pytest.fixture
def x64():
    """Enable 64-bit types in JAX for this test."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


class Bound(Passes):
    """A model with its own parameters and gradients, in memory that starts ``offset`` bytes after a cache line."""

    def __init__(self, model, offset=0):
        def allocate(size, dtype):
            memory = np.zeros(size * dtype.itemsize + 128, np.uint8)
            start = -memory.ctypes.data % 64 + offset
            return memory[start : start + size * dtype.itemsize].view(dtype)

        super().__init__(model, allocate=allocate)

    def compute(self, x, targets, draw=None):
        """Return the mean loss and its gradients by name."""
        scale = 1 / (len(x) * self.model.tokens_per_sample)
        loss = scale * self.step([(x, targets)], scale, draw)
        return loss, {segment.key: self.gradient.view(segment.key).copy() for segment in self.model.layout.segments}


def difference(result, reference):
    """Return the largest difference between two pytrees, relative to the largest value of the reference."""
    pairs = zip(jax.tree_util.tree_leaves(result), jax.tree_util.tree_leaves(reference), strict=True)
    apart = [(np.abs(np.asarray(a) - np.asarray(b)).max(), np.abs(np.asarray(b)).max()) for a, b in pairs]
    return max(one for one, _ in apart) / max(size for _, size in apart)


def plain_loss_and_gradient(functions, params, x, targets, loss):
    def mean_loss_of_batch(params):
        return loss(models.compose(functions, params, x), targets).mean()

    value, gradient = jax.jit(jax.value_and_grad(mean_loss_of_batch))(params)
    return float(value), gradient


@pytest.mark.matrix
def test_transformer_gradients_match_plain_jax(rng, x64):
    functions, params = models.gpt(rng, dtype="float64")
    x, targets = models.tokens(rng, 3)
    model = adapter.wrap(functions, params, models.token_losses, example=(x[:1], targets[:1]))
    assert model.tokens_per_sample == models.CONTEXT
    value, gradients = Bound(model).compute(x, targets)
    requested, leaves = plain_loss_and_gradient(functions, params, x, targets, models.token_losses)
    assert value == pytest.approx(requested, rel=1e-14)
    assert difference(model.trees(gradients), leaves) < 1e-13


def mean_of_squares(y, targets):
    return models.squares(y, targets).mean()


@pytest.mark.parametrize("keep", ["products", "everything", "nothing"])
@pytest.mark.parametrize("loss", [models.squares, mean_of_squares])
@pytest.mark.full
def test_micro_batch_gradients_and_evaluation_match_whole_batch(rng, keep, loss):
    """Gradients of micro-batches of 4, 1 and 2 samples add up in float32, to 1e-6 of the largest gradient."""
    functions, params = models.mlp(rng)
    x, targets = models.rows(rng, 7)
    bound = Bound(adapter.wrap(functions, params, loss, example=(x, targets), keep=keep))
    count = len(x) * bound.model.tokens_per_sample
    assert bound.model.tokens_per_sample == (2 if loss is models.squares else 1)
    requested, leaves = plain_loss_and_gradient(functions, params, x, targets, loss)
    assert bound.model.evaluate(bound.parameters, x, targets, bound.arena) / count == pytest.approx(requested, 1e-6)
    bound.gradient.array[...] = np.nan  # the first write must overwrite, not add
    bound.begin_step()
    total = 0.0
    for number, part in enumerate((slice(0, 4), slice(4, 5), slice(5, 7))):
        total += bound.loss(bound.forward(x[part], None, number), targets[part], number)
        bound.backward(1 / count, microbatch=number)
    assert total / count == pytest.approx(requested, rel=1e-6)
    results = {segment.key: bound.gradient.view(segment.key) for segment in bound.model.layout.segments}
    assert difference(bound.model.trees(results), leaves) < 1e-6
    assert not bound.arena._live


def test_each_pass_copies_a_tensor_at_most_once_each_way(rng):
    """Unaligned parameters are copied once per forward and once per backward. Aligned parameters are not copied."""
    functions, params = models.mlp(rng)
    x, targets = models.rows(rng, 4)
    for offset, copies in ((16, 2), (0, 0)):
        model = adapter.wrap(functions, params, models.squares, example=(x, targets))
        bound = Bound(model, offset)
        bound.compute(x, targets)
        before = parameters.JaxTraffic(**vars(model.traffic))
        bound.compute(x, targets)
        stages, tensors, size = len(model.stages), len(model.layout.segments), 4 * model.layout.parameters
        activations = [4 * int(np.prod(stage.output_shape(4))) for stage in model.stages]
        # The test does not align inputs and targets: each is either viewed or copied once.
        copied_in = model.traffic.copied_in - before.copied_in - copies * tensors
        copied_bytes = model.traffic.copied_in_bytes - before.copied_in_bytes - copies * size
        assert (copied_in, copied_bytes) in {(0, 0), (1, x.nbytes), (1, targets.nbytes), (2, x.nbytes + targets.nbytes)}
        # Out: each gradient, the output of each stage, its gradient.
        assert model.traffic.copied_out - before.copied_out == tensors + 2 * stages
        assert model.traffic.copied_out_bytes - before.copied_out_bytes == size + 2 * sum(activations)


@pytest.mark.matrix
def test_passes_keep_no_parameters_between_forward_and_backward(rng):
    """No copy of a layer's parameters is kept between the passes, as ZeRO-3 requires."""

    def cast(params, x):  # results that depend only on params are not kept either
        mixed = jnp.tanh(params["left"] @ params["right"])
        return x + jnp.tanh(x @ mixed.astype(jnp.bfloat16).astype(jnp.float32)) @ params["right"]

    functions, params = models.mlp(rng)
    wide = models.HIDDEN
    draws = [rng.standard_normal((wide, wide)).astype(np.float32) * 0.3 for _ in range(2)]
    functions[1], params[1] = cast, {"left": draws[0], "right": draws[1]}
    x, targets = models.rows(rng, 2)
    for keep in ("products", "everything"):
        model = adapter.wrap(functions, params, models.squares, example=(x, targets), keep=keep)
        bound = Bound(model)
        bound.begin_step()
        bound.loss(bound.forward(x), targets)
        elsewhere = FlatStore(model.layout, model.dtype)
        elsewhere.copy_from(bound.store)
        bound.store.array[...] = np.nan
        bound.parameters = model.bind(elsewhere)
        bound.backward(1 / targets.size)
        results = {segment.key: bound.gradient.view(segment.key) for segment in model.layout.segments}
        assert (
            difference(model.trees(results), plain_loss_and_gradient(functions, params, x, targets, models.squares)[1])
            < 1e-5
        )
        matrix = 2 * wide * 4  # one activation
        held = model.stages[1].kept_bytes(2)
        assert held == matrix if keep == "products" else matrix <= held <= 3 * matrix


def test_kept_activation_bytes_follow_the_keep_policy(rng):
    functions, params = models.gpt(rng, layers=1)
    example = models.tokens(rng, 1)
    kept = {
        keep: adapter.wrap(functions, params, models.token_losses, example=example, keep=keep).stages[1].kept_bytes(8)
        for keep in ("nothing", "products", "everything")
    }
    row = 8 * models.CONTEXT * models.HIDDEN * 4
    assert kept["nothing"] == 0
    # qkv, projection and up. A product that only an addition uses is not kept.
    assert 8 * row <= kept["products"] <= 9 * row
    assert kept["everything"] > 2 * kept["products"]


def test_equal_stages_are_compiled_once(rng):
    functions, params = models.mlp(rng, depth=5)
    example = models.rows(rng, 2)
    model = adapter.wrap(functions, params, models.squares, example=example)
    Bound(model).compute(*example)
    assert len(model.stages[0]._shared.passes) == 3  # the first, those between, the last
    assert [stage.layer for stage in model.stages] == list(range(7))


def test_parameter_names_weight_decay_and_initial_values(rng):
    class Pair(tuple):
        pass

    params = [{"a/b": [np.full((2, 3), 2.0, np.float32)]}, lambda: (jnp.ones((3, 3)), jnp.zeros(3))]
    functions = [lambda p, x: x @ p["a/b"][0], lambda p, x: x @ p[0] + p[1]]
    example = np.zeros((1, 2), np.float32), np.zeros((1, 3), np.float32)
    model = adapter.wrap(functions, params, lambda y, t: (y - t) ** 2, example=example)
    assert {segment.key: segment.spec.adapted for segment in model.layout.segments} == {
        "0.a.b.0": True,
        "1.0": True,
        "1.1": False,
    }
    assert (model.seeded, model.tokens_per_sample, model.dtype.name) == (False, 3, "float32")
    bound = Bound(model)
    trees = model.trees({segment.key: bound.store.view(segment.key) for segment in model.layout.segments})
    np.testing.assert_array_equal(trees[0]["a/b"][0], 2.0)
    assert isinstance(trees[1], tuple) and trees[1][0].tolist() == np.ones((3, 3)).tolist()
    other = adapter.wrap(
        functions, params, lambda y, t: (y - t) ** 2, example=example, adapted=lambda name, leaf: name == "1.1"
    )
    assert [segment.key for segment in other.layout.segments if segment.spec.adapted] == ["1.1"]


def test_stages_without_params_are_merged_into_a_neighbour(rng):
    functions = [lambda p, x: 2 * x, lambda p, x: x @ p, lambda p, x: jnp.tanh(x), lambda p, x: x @ p["w"]]
    matrices = [rng.standard_normal((3, 3)).astype(np.float32) for _ in range(2)]
    params = [(), matrices[0], None, {"w": matrices[1]}]
    x, targets = (rng.standard_normal((4, 3)).astype(np.float32) for _ in range(2))
    model = adapter.wrap(functions, params, lambda y, t: ((y - t) ** 2).mean(), example=(x, targets))
    assert [segment.key for segment in model.layout.segments] == ["0.value", "1.w"]
    value, _ = Bound(model).compute(x, targets)
    assert value == pytest.approx(np.mean((np.tanh(2 * x @ matrices[0]) @ matrices[1] - targets) ** 2), rel=1e-5)
    trees = model.trees({"0.value": matrices[0], "1.w": matrices[1]})
    assert trees[0] == () and trees[2] is None and trees[1] is matrices[0]


def tied_gpt(rng, layers):
    """Return a GPT's functions, its float64 params without the tied leaf, and a reference loss of these params."""
    functions, params = models.gpt(rng, layers, "float64")
    functions[-1] = models.tied_head
    params[-1] = {"norm": params[-1]["norm"]}

    def loss(params, batch):
        last = {**params[-1], "table": params[0]["table"]}
        return models.mean_loss(models.compose(functions, [*params[:-1], last], batch[0]), batch[1])

    return functions, params, loss


def wrap_tied(functions, params, example):
    local_parameters = [*params[:-1], {**params[-1], "table": params[0]["table"]}]
    tied = {f"{len(local_parameters) - 1}.table": "0.table"}
    return adapter.wrap(functions, local_parameters, models.token_losses, example=example, tied=tied)


@pytest.mark.full
def test_tied_tensors_have_one_gradient(rng, x64):
    functions, params, loss = tied_gpt(rng, 1)
    batch = models.tokens(rng, 3)
    model = wrap_tied(functions, params, batch)
    assert "2.table" not in model.layout.by_key and model.stages[2].tied == {"table": "0.table"}
    _, gradients = Bound(model).compute(*batch)
    requested = jax.jit(jax.grad(loss))(params, batch)
    result = model.trees(gradients)
    np.testing.assert_array_equal(result[-1].pop("table"), result[0]["table"])
    assert difference(result, requested) < 1e-13


def dropout_layer(params, x, keys):
    y = jnp.tanh(x @ params)
    if keys is None:
        return y
    return jax.vmap(lambda key, row: jnp.where(jax.random.bernoulli(key, 0.5, row.shape), 2 * row, 0))(keys, y)


@pytest.mark.matrix
def test_dropout_depends_on_seed_step_and_sample(rng, x64):
    """The dropout mask depends on seed, step and sample, not on micro-batches. Without a draw nothing is dropped."""
    params = [rng.standard_normal((8, 8)) for _ in range(2)]
    x = rng.standard_normal((5, 8))
    model = adapter.wrap([dropout_layer, dropout_layer], params, lambda y, t: (y - t) ** 2, example=(x, x))
    bound = Bound(model)

    def outputs_of_two_parts(x, draw):
        return np.concatenate([forward(bound, samples, draw, first) for first, samples in ((0, x[:2]), (2, x[2:]))])

    def forward(bound, x, draw, first):
        moved = draw and Draw(draw.seed, draw.step, draw.first_sample + first)
        y = model.forward(bound.parameters, x, bound.arena, 7, moved).copy()
        for stage in model.stages:
            bound.arena.saved(stage.layer, 7).release()
        return y

    draw = Draw(seed=(1 << 40) + 3, step=2, first_sample=10)
    whole_output = forward(bound, x, draw, 0)
    np.testing.assert_array_equal(outputs_of_two_parts(x, draw), whole_output)
    assert 0 < np.count_nonzero(whole_output == 0) < whole_output.size
    for other in (Draw(3, 2, 10), Draw((1 << 40) + 3, 3, 10), Draw((1 << 40) + 3, 2, 11)):
        assert (forward(bound, x, other, 0) != whole_output).any()
    np.testing.assert_allclose(forward(bound, x, None, 0), np.tanh(np.tanh(x @ params[0]) @ params[1]), atol=1e-14)
    _, gradients = bound.compute(x, x, draw)  # the backward uses the dropout mask of the forward
    again, moved = Bound(model), 1e-6
    direction = rng.standard_normal(model.layout.size)
    sides = []
    for sign in (1, -1):
        again.store.array[...] = bound.store.array + sign * moved * direction
        sides.append(again.loss(again.forward(x, draw), x) / x.size)
        for stage in model.stages:
            again.arena.saved(stage.layer).release()
    slope = sum(float((gradients[s.key].ravel() * direction[s.range.slice]).sum()) for s in model.layout.segments)
    assert (sides[0] - sides[1]) / (2 * moved) == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_nonfinite_parameters_give_nonfinite_loss_and_gradient(rng):
    functions, params = models.mlp(rng)
    x, targets = models.rows(rng, 2)
    for bad in (np.nan, np.inf):
        bound = Bound(adapter.wrap(functions, params, models.squares, example=(x, targets)))
        bound.store.view("2.b")[1] = bad
        loss, gradients = bound.compute(x, targets)
        assert not np.isfinite(loss)
        assert not np.isfinite(gradients["0.w"]).all()


def test_nonfinite_output_is_reported_with_its_layer(rng):
    functions, params = models.mlp(rng, depth=2)
    functions[2] = lambda p, x: models.active(p, x) * jnp.where(x[:, :1] > -jnp.inf, jnp.inf, 1)
    x, targets = models.rows(rng, 4)
    model = adapter.wrap(functions, params, models.squares, example=(x, targets))
    trainer = models.trainer_of(solo(), model, 4, {})
    with pytest.raises(ArithmeticError):
        models.step(trainer, 1, (x, targets))
    result = trainer.executor.inspect(trainer.operations, trainer.cut((x, targets)))
    assert result == "output of layer 2 in micro-batch 0"
    trainer.close()


# 8 samples a step: micro-batches of 2, except on 3 ranks, to compile little.
ZERO3 = {"parallel.strategy": "zero3", "parallel.microbatches": 2}
STRATEGIES = [
    (1, {"parallel.microbatches": 4}),
    (2, {"parallel.strategy": "allreduce", "parallel.microbatches": 2}),
    (3, {"parallel.strategy": "zero2"}),
    (2, ZERO3),
    (2, {"parallel.pipeline": 2, "parallel.microbatches": 4, "parallel.partition": "measured"}),
    (2, {"parallel.pipeline": 2, "parallel.microbatches": 4, "parallel.recompute": "true"}),
    (2, {"parallel.pipeline": 2, "parallel.microbatches": 4, "parallel.schedule": "zb-h1"}),
    (4, {**ZERO3, "parallel.pipeline": 2, "zero.keep_gradients": "true"}),  # tied tensors need kept gradients
]


@pytest.mark.matrix
def test_every_strategy_matches_plain_jax_and_optax(rng, x64):
    """Three steps on 1 to 4 ranks: losses agree to 1e-12, params to 1e-8, with tensors tied across the pipeline."""
    functions, params, loss = tied_gpt(rng, 2)
    batches = [models.tokens(rng, 8) for _ in range(3)]
    losses, after = models.train_plain(params, loss, batches)
    model = wrap_tied(functions, params, batches[0])  # shared by all ranks: it has no state and compiles once
    for size, keys in STRATEGIES:
        for result in run_threads(size, lambda comm, keys=keys: models.train(comm, lambda: model, batches, keys)):
            assert result.losses == pytest.approx(losses, rel=1e-12), keys
            trees = model.trees(result.tensors)
            del trees[-1]["table"]
            assert difference(trees, after) < 1e-8, keys


ROW = np.zeros((2, 3), np.float32)
MATRIX = np.eye(3, dtype=np.float32)


def product(p, x):
    return x @ p["w"]


@cases(
    "stages, params, more, error, output",
    ([product], [{"w": MATRIX, "spare": ROW}], {}, ConfigurationError, r"tensor 0\.spare has no gradient"),
    (
        [lambda p, x: x @ jax.lax.stop_gradient(p["w"]) + p["b"]],
        [{"w": MATRIX, "b": ROW[0]}],
        {},
        ConfigurationError,
        r"tensor 0\.w has no gradient",
    ),
    ([lambda p, x: (x @ p["w"])[:1]], [{"w": MATRIX}], {}, UsageError, r"stage 0 .* returns shape \(1, 3\) for 2"),
    ([lambda p, x: (x @ p["w"]).reshape(len(x), -1)[:, : len(x)]], [{"w": MATRIX}], {}, UsageError, "for one sample; "),
    ([lambda p, x: (x @ p["w"], x)], [{"w": MATRIX}], {}, UsageError, "must return one array"),
    ([lambda p, x: (x @ p["w"]).astype(jnp.bfloat16)], [{"w": MATRIX}], {}, UsageError, "returns bfloat16"),
    ([product], [{"w": MATRIX.astype(np.float16)}], {}, ConfigurationError, "w in the params of stage 0 is float16"),
    ([product], [{"w": MATRIX.astype(np.float64)}], {}, ConfigurationError, "JAX_ENABLE_X64"),
    ([product], [{"w": MATRIX, "n": np.arange(3)}], {}, ConfigurationError, "n in the params .* is int64|is int64"),
    ([product], [{"w": 1.0}], {}, UsageError, "w in the params of stage 0 is a float"),
    ([product, product], [{"w": MATRIX}, {"w": MATRIX}], {}, UsageError, r"1\.w and 0\.w are the same array"),
    ([product], [{"w": MATRIX}], {"tied": {"0.v": "0.w"}}, UsageError, r"tied names the tensor '0\.v'"),
    ([product], [{"w": MATRIX}], {"tied": {"0.w": "0.w"}}, UsageError, "in an earlier stage"),
    ([product], [{"w": MATRIX}], {"keep": "some"}, UsageError, "keep = 'some'"),
    ([product], [], {}, UsageError, "got 1 stages and 0 params"),
    ([lambda p, x: x], [{}], {}, UsageError, "nothing to train"),
    ([lambda p: p], [{"w": MATRIX}], {}, UsageError, r"has the arguments \(p\)"),
    (["product"], [{"w": MATRIX}], {}, UsageError, "stage 0 is a str"),
    ([product], [{"w": MATRIX}], {"example": ROW}, UsageError, "give a pair"),
    ([product], [{"w": MATRIX}], {"example": (ROW, ROW[:1])}, UsageError, "2 inputs and 1 targets"),
    ([product], [{"w": MATRIX}], {"loss": lambda y, t: (y - t).sum(0)}, UsageError, "the loss has shape"),
    ([product], [{"w": MATRIX}], {"loss": lambda y, t: y > t}, UsageError, "return losses"),
)
def test_bad_input_is_rejected_with_its_cause(stages, params, more, error, output):
    options = {"loss": models.squares, "example": (ROW, ROW), **more}
    with pytest.raises(error, match=output):
        adapter.wrap(stages, params, **options)


def test_invalid_ties_are_rejected(rng):
    params = [{"w": MATRIX, "b": ROW[0]}, {"w": MATRIX.copy()}]
    functions = [lambda p, x: x @ p["w"] + p["b"], product]
    for tie, output in (({"1.w": "0.b"}, "have different shapes"), ({"1.w": "0.w"}, "all tensors of stage 1")):
        with pytest.raises(UsageError, match=output):
            adapter.wrap(functions, params, models.squares, example=(ROW, ROW), tied=tie)


def test_error_while_tracing_names_the_stage(rng):
    with pytest.raises(TypeError) as caught:
        adapter.wrap([product], [{"w": np.ones((4, 4), np.float32)}], models.squares, example=(ROW, ROW))
    assert any("while JAX traced stage 0 (product)" in note for note in caught.value.__notes__)


def test_samples_unlike_the_example_are_rejected():
    model = adapter.wrap([product], [{"w": MATRIX}], models.squares, example=(ROW, ROW))
    bound = Bound(model)
    for x in (np.zeros((2, 4), np.float32), np.zeros((2, 3), np.int32)):
        with pytest.raises(DataError, match=r"stage 0 \(product\) got samples"):
            model.forward(bound.parameters, x, Arena())


def test_integers_beyond_32_bits_are_rejected():
    traffic = parameters.JaxTraffic()
    assert traffic.bring(np.array([[1, 2]], np.int64)).dtype == np.int32
    for wrong in (1 << 40, -(1 << 40)):
        with pytest.raises(DataError, match=str(wrong)):
            traffic.bring(np.array([1, wrong], np.int64))
    assert traffic.bring(np.zeros((0, 3), np.int64)).shape == (0, 3)


def test_model_on_another_device_than_the_recipe_is_rejected(monkeypatch):
    class Elsewhere:
        platform = "gpu"

    class Leaf:
        shape, dtype = (3, 3), np.dtype(np.float32)

        def devices(self):
            return {Elsewhere()}

    leaf = Leaf()
    model = adapter.wrap([product], [{"w": leaf}], models.squares, example=(ROW, ROW))
    assert model.on == "gpu"
    with pytest.raises(ConfigurationError, match="run.device"):
        models.trainer_of(solo(), model, 2, {})
    Elsewhere.platform = "tpu"
    with pytest.raises(ConfigurationError, match="tpu"):
        adapter.wrap([product], [{"w": leaf}], models.squares, example=(ROW, ROW))


def test_missing_jax_error_names_the_extra(monkeypatch):
    def raise_import_error(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(parameters.importlib, "import_module", raise_import_error)
    parameters.library.cache_clear()
    try:
        with pytest.raises(MissingCapabilityError, match=r"install hpcdist\[jax\]"):
            adapter.wrap([product], [{"w": MATRIX}], models.squares, example=(ROW, ROW))
    finally:
        parameters.library.cache_clear()


def test_threads_can_share_a_model(rng):
    """Several threads may compile passes at the same time."""
    functions, params = models.mlp(rng)
    x, targets = models.rows(rng, 3)
    model = adapter.wrap(functions, params, models.squares, example=(x[:1], targets[:1]))
    results = []
    threads = [threading.Thread(target=lambda: results.append(Bound(model).compute(x, targets)[0])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3 and len(set(results)) == 1


def test_sum_loss_is_rejected(rng):
    functions, params = models.mlp(rng)
    x, targets = models.rows(rng, 7)
    with pytest.raises(UsageError, match=r"the loss is a sum: .* return losses of shape \(samples, ...\)"):
        adapter.wrap(functions, params, lambda y, t: models.squares(y, t).sum(), example=(x, targets))


def weights_of_targets(targets):
    """Return weights (samples, columns) that differ between samples: True for targets of at least 0.1."""
    return targets >= 0.1


def sum_and_weight(y, targets):
    return (models.squares(y, targets) * weights_of_targets(targets)).sum(), weights_of_targets(targets).sum()


def masked_mean(y, targets):
    total, weight = sum_and_weight(y, targets)
    return total / weight


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "keys"), [(1, {"parallel.microbatches": 3}), (3, ZERO3), (2, {"parallel.pipeline": 2})]
)
def test_sum_and_weight_loss_matches_whole_batch(rng, x64, size, keys):
    functions, params = models.mlp(rng, "float64")
    batches = [models.rows(rng, 9, "float64") for _ in range(3)]
    losses, after = models.train_plain(
        params, lambda params, batch: masked_mean(models.compose(functions, params, batch[0]), batch[1]), batches
    )
    model = adapter.wrap(functions, params, sum_and_weight, example=batches[0])
    for result in run_threads(size, lambda comm: models.train(comm, lambda: model, batches, keys)):
        assert result.losses == pytest.approx(losses, rel=1e-12)
        assert difference(model.trees(result.tensors), after) < 1e-8


def test_evaluation_with_sum_and_weight_matches_all_samples(rng):
    functions, params = models.mlp(rng)
    x, targets = models.rows(rng, 9)
    model = adapter.wrap(functions, params, sum_and_weight, example=(x, targets))
    trainer = models.trainer_of(solo(), model, 9, {})
    result = trainer.evaluate([[(x[:2], targets[:2])], [(x[2:], targets[2:])]])
    assert result == pytest.approx(float(masked_mean(models.compose(functions, params, x), targets)), rel=1e-6)
    trainer.close()


@cases(
    "loss, output",
    (masked_mean, r"does not show that every sample has the same weight; return \(sum, weight\)"),
    (
        lambda y, t: jnp.mean(models.squares(y, t), where=weights_of_targets(t)),
        "does not show that every sample has the same weight",
    ),
    (lambda y, t: (models.squares(y, t) / jnp.abs(t).sum()).sum(), "no mean over samples|does not show"),
    (lambda y, t: jnp.sqrt(models.squares(y, t).mean()), "no mean over samples|does not show"),
    (lambda y, t: sum_and_weight(y, t)[:1], r"return losses \(samples, ...\), their mean, or \(sum, weight\)"),
    (lambda y, t: (models.squares(y, t).sum(), weights_of_targets(t)), r"a pair \(sum, weight\) with the shapes"),
)
def test_weighted_mean_without_visible_weights_is_rejected(loss, output, rng):
    functions, params = models.mlp(rng)
    x, targets = models.rows(rng, 7)
    with pytest.raises(UsageError, match=output):
        adapter.wrap(functions, params, loss, example=(x, np.abs(targets)))


@pytest.mark.parametrize("loss", [mean_of_squares, jax.jit(mean_of_squares)])
def test_mean_over_all_losses_is_accepted(loss, rng):
    functions, params = models.mlp(rng)
    model = adapter.wrap(functions, params, loss, example=models.rows(rng, 7))
    assert model.loss.is_mean and not model.loss.weighs
