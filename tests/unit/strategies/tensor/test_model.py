"""A gpt split over tensor ranks: the numbers of the whole model, and the messages of a block."""

import numpy as np
import pytest

from harness.marks import cases
from hpcdist import models
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint import manifest
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.checkpoint.two_phase import save
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import ConfigurationError
from hpcdist.models.arena import Arena
from hpcdist.models.config import ModelConfig
from hpcdist.models.split_backward import split_operations, weight_gradients
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.sharded_update import counted, sum_gradients
from hpcdist.strategies.tensor.model import cut_model
from hpcdist.training.recipe.config import DataConfig
from hpcdist.training.recipe.recipe import Recipe

CONTEXT, BATCH = 7, 3  # 21 tokens: uneven rows on 2 and 4 ranks
WHOLE = Range(0, 1 << 40)


def check_tensor_parallel(config, ranks, by_rows):
    """Check a recipe of the model on ``ranks`` tensor ranks. Raises if it is rejected."""
    parallel = ParallelConfig(tensor=ranks, sequence_parallel=by_rows and ranks > 1)
    Recipe(model=config, data=DataConfig(context=CONTEXT), parallel=parallel)


QUERY_KEY_NORM = {
    "norm": "rms",
    "positions": "rotary",
    "query_key_norm": "head",
    "biased": "qkv",
    "rotary_layers": "2",
    "activation": "swiglu",
    "norm_epsilon": 1e-3,
    "window": 3,
    "window_layers": "1",
}


def build_model(ranks, tied=False, dtype="float64", **fields):
    heads = 6 if ranks == 3 else 4
    config = ModelConfig(layers=2, hidden=4 * heads, heads=heads, vocabulary=37, tied=tied, **fields)
    check_tensor_parallel(config, ranks, True)
    return models.build(config, dtype, context=CONTEXT)


def batches(rng, count=2):
    tokens = rng.integers(0, 37, (count, BATCH, CONTEXT + 1)).astype(np.uint16)
    return [(part[:, :-1], part[:, 1:]) for part in tokens]


def random_parameters(model, seed):
    """Return random parameters of the whole model or of a part of it."""
    store = FlatStore(model.layout, model.dtype)
    model.initialise(store, seed)
    for segment in model.layout.segments:
        spec = segment.spec
        noise = np.random.default_rng([seed, len(spec.key), *map(ord, spec.key)]).standard_normal(
            spec.whole or spec.shape
        )
        inside = tuple(slice(*ends) for ends in spec.box) if spec.whole else ...
        store.view(segment.key)[...] += 0.05 * noise[inside]
    return store


def step(model, seed, result, *, split=False):
    """Return (losses, gradients) of the micro-batches ``result``. Gradients are added over them."""
    store, gradient = random_parameters(model, seed), FlatStore(model.layout, model.dtype)
    parameters, into, arena = model.bind(store), model.bind_gradients(gradient), Arena()
    for stage in into:
        stage.begin_step()
    operations, losses = model.operations, []
    for number, (x, targets) in enumerate(result):
        logits = model.forward(parameters, x, arena, number)
        last = arena.saved(model.stages[-1].layer, number)
        losses.append(model.loss.forward(logits, targets, operations, last))
        if not split:
            model.backward(parameters, into, 0.25, arena, number)
            continue
        d = model.loss.backward(0.25, operations, last)
        for stage, views, gradients in zip(model.stages[::-1], parameters[::-1], into[::-1], strict=True):
            saved = arena.saved(stage.layer, number)
            d = stage.backward(views, gradients, d, split_operations(operations), saved)
            d = None if d is None else d.copy()
            saved.narrow()
        for stage, views, gradients in zip(model.stages[::-1], parameters[::-1], into[::-1], strict=True):
            saved = arena.saved(stage.layer, number)
            weight_gradients(views, gradients, operations, saved)
            saved.release()
    for stage in into:
        stage.finish()
    return losses, gradient


def pieces(store, parts=(WHOLE,)):
    result = (result for part in parts for result in store.layout.within(part))
    return [Piece.of("parameters", segment, where, store.range(where)) for segment, where in result]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_loss_and_gradients_match_the_whole_model(ranks, tied, by_rows, split, rng):
    check_gradients(ranks, tied, by_rows, split, rng, {})


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 2), (3, 3)])
def test_gradients_of_head_norms_match_the_whole_model(ranks, kv_heads, by_rows, rng):
    check_gradients(ranks, False, by_rows, False, rng, {**QUERY_KEY_NORM, "kv_heads": kv_heads, "head_size": 6})


def check_gradients(ranks, tied, by_rows, split, rng, fields):
    """Check losses and gradients of a tensor-parallel model against the whole model."""
    result, seed = batches(rng), int(rng.integers(1 << 30))
    whole = build_model(ranks, tied, **fields)
    losses, gradient = step(whole, seed, result)

    def body(comm):
        model = cut_model(build_model(ranks, tied, **fields), comm, sequence_parallel=by_rows)
        assert model.layout.size <= whole.layout.size / comm.size + 2000
        mine, local_data = step(model, seed, result, split=split)
        sum_gradients(local_data, local_data.parts, comm, "native")
        return mine, {
            segment.key: (segment.spec, local_data.view(segment.key).copy()) for segment in model.layout.segments
        }

    everyone = run_threads(ranks, body)
    np.testing.assert_allclose(np.sum([mine for mine, _ in everyone], axis=0), losses, rtol=1e-13)
    norm = np.linalg.norm(gradient.array)
    for _, tensors in everyone:
        for key, (spec, values) in tensors.items():
            inside = tuple(slice(*ends) for ends in spec.box) if spec.whole else ...
            assert np.linalg.norm(values - gradient.view(key)[inside]) <= 1e-13 * norm, key
    for key, (spec, values) in everyone[0][1].items():
        if not spec.whole:
            assert all((tensors[key][1] == values).all() for _, tensors in everyone), f"{key} differs"


def test_evaluation_matches_the_whole_model(rng):
    ((x, targets),), seed = batches(rng, 1), int(rng.integers(1 << 30))
    whole = build_model(4)
    expected = whole.evaluate(whole.bind(random_parameters(whole, seed)), x, targets, Arena())

    def body(comm):
        model = cut_model(build_model(4), comm, sequence_parallel=comm.size == 4)
        return model.evaluate(model.bind(random_parameters(model, seed)), x, targets, Arena())

    for ranks in (2, 4):
        assert sum(run_threads(ranks, body)) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("by_rows", [False, True])
def test_logits_of_any_length_match_the_whole_model(by_rows, rng):
    ((x, _),), seed, whole = batches(rng, 1), int(rng.integers(1 << 30)), build_model(4)
    expected = whole.logits(whole.bind(random_parameters(whole, seed)), x, Arena())

    def body(comm):
        model = cut_model(build_model(4), comm, sequence_parallel=by_rows)
        parameters, arena = model.bind(random_parameters(model, seed)), Arena()
        return [model.logits(parameters, x[:, :length], arena) for length in (CONTEXT, 1, 4)]

    for result in run_threads(4, body):
        for logits in result:
            np.testing.assert_allclose(logits, expected[:, : logits.shape[1]], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("ranks", "by_rows"), [(2, False), (4, False), (2, True), (4, True)])
def test_sent_bytes_of_a_block(ranks, by_rows, rng):
    """A block sends four allreduces of the activations per step.

    Sequence parallelism splits each into halves, and adds two halves.
    """
    ((x, targets),), seed = batches(rng, 1), 3

    def body(comm, layers):
        config = ModelConfig(layers=layers, hidden=32, heads=4, vocabulary=40)
        model = cut_model(models.build(config, "float64", context=CONTEXT), comm, "ring", sequence_parallel=by_rows)
        with count_traffic(comm) as traffic:
            step(model, seed, [(x, targets)])
        assert not traffic.unknown
        return traffic.sent_bytes

    one, two = (sum(run_threads(ranks, lambda comm, layers=layers: body(comm, layers))) for layers in (1, 2))
    activations = BATCH * CONTEXT * 32 * 8
    assert two - one == (10 if by_rows else 8) * activations * (ranks - 1)  # of all ranks together


@pytest.mark.parametrize("by_rows", [False, True])
def test_model_checkpoints_move_between_tensor_degrees(by_rows, tmp_path, rng):
    seed, whole = int(rng.integers(1 << 30)), build_model(4)
    path = save(tmp_path, 0, pieces(random_parameters(whole, seed)), {}, solo())

    def body(comm, path, step):
        model = cut_model(build_model(4), comm, sequence_parallel=by_rows)
        store = FlatStore(model.layout, model.dtype)
        restore(path, pieces(store))
        assert (store.array == random_parameters(model, seed).array).all()
        return save(tmp_path, step, pieces(store, counted(model.layout, [WHOLE], comm)), {}, comm, keep=9)

    for number, ranks in enumerate((1, 2, 4, 1), 1):
        path = run_threads(ranks, lambda comm, path=path, number=number: body(comm, path, number))[0]
        assert sum(entry.flat[1] - entry.flat[0] for entry in manifest.load(path).pieces) == whole.layout.parameters


def test_uncut_tensors_are_saved_once():
    def body(comm):
        model = cut_model(build_model(4), comm)
        local_data = counted(model.layout, [WHOLE], comm)
        return [piece.tensor for piece in pieces(FlatStore(model.layout, model.dtype), local_data)]

    first, *others = run_threads(4, body)
    assert all({"1.norm1.scale", "0.positions.weight", "2.down.bias"} & set(other) == set() for other in others)
    assert set(first) == set(build_model(4).layout.by_key)


@cases(
    "config, ranks, output",
    (ModelConfig(heads=4), 3, r"parallel.tensor = 3 with model.heads = 4: .*\[1, 2, 4\] ranks, or a multiple of 3"),
    (ModelConfig(kind="mlp"), 2, "parallel.tensor = 2 with model.kind = 'mlp'"),
    (ModelConfig(vocabulary=3), 4, "parallel.tensor = 4 with model.vocabulary = 3: .* at most 3 tensor ranks"),
    (ModelConfig(heads=16), 16, "parallel.tensor = 16 with data.context = 7"),
)
def test_models_that_cannot_be_split_are_rejected(config, ranks, output):
    with pytest.raises(ConfigurationError, match=output):
        check_tensor_parallel(config, ranks, True)


def test_stages_of_other_models_are_rejected():
    whole = models.build(ModelConfig(kind="mlp"), features=3, classes=2)

    def body(comm):
        with pytest.raises(ConfigurationError, match="parallel.tensor = 2, but this model is not a transformer"):
            cut_model(whole, comm)

    run_threads(2, body)
    assert cut_model(whole, solo()) is whole


OPTIONS = {
    "llama": {"positions": "rotary", "norm": "rms", "activation": "swiglu", "kv_heads": 2, "bias": False},
    "grouped": {"kv_heads": 2, "feed_forward": 21, "tied": True},
    "encoder": {"kind": "encoder", "positions": "rotary"},
    "encoder llama": {"kind": "encoder", "norm": "rms", "activation": "swiglu", "kv_heads": 2, "feed_forward": 19},
}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_transformer_options_match_the_whole_model(options, by_rows, split, rng):
    config = ModelConfig(layers=2, hidden=16, heads=4, vocabulary=37, **OPTIONS[options])
    check_tensor_parallel(config, 2, by_rows)
    result, seed = batches(rng), int(rng.integers(1 << 30))
    whole = models.build(config, "float64", context=CONTEXT)
    if config.kind == "encoder":
        result = [(x, np.where(np.arange(CONTEXT) == 2, targets.astype(int), -1)) for x, targets in result]
    losses, gradient = step(whole, seed, result)

    def body(comm):
        model = cut_model(models.build(config, "float64", context=CONTEXT), comm, sequence_parallel=by_rows)
        mine, local_data = step(model, seed, result, split=split)
        sum_gradients(local_data, local_data.parts, comm, "native")
        return mine, {
            segment.key: (segment.spec, local_data.view(segment.key).copy()) for segment in model.layout.segments
        }

    everyone = run_threads(2, body)
    np.testing.assert_allclose(np.sum([mine for mine, _ in everyone], axis=0), losses, rtol=1e-13)
    norm = np.linalg.norm(gradient.array)
    for _, tensors in everyone:
        for key, (spec, values) in tensors.items():
            inside = tuple(slice(*ends) for ends in spec.box) if spec.whole else ...
            assert np.linalg.norm(values - gradient.view(key)[inside]) <= 1e-12 * norm, key


def test_time_of_messages_inside_stages_is_measured(rng):
    result, whole = batches(rng, 1), build_model(2)

    def body(comm):
        model = cut_model(build_model(2), comm, sequence_parallel=True)
        step(model, 1, result)
        return model.communicated_s(), model.communicated_s()

    assert whole.communicated_s() == 0
    assert all(spent > 0 and again == 0 for spent, again in run_threads(2, body))
