"""Muon compared with torch.optim.Muon, on the CPU and on the double of a GPU, and its cuts between matrices."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from harness.marks import cases
from hpcdist import models
from hpcdist.arrays.dtypes import BFLOAT16, dtype_of
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import ConfigurationError
from hpcdist.models.config import ModelConfig
from hpcdist.optim import muon, optimizer
from hpcdist.optim.config import OptimizerConfig
from hpcdist.optim.master_weights import MasterWeights

UPDATES = 10
BOUNDS = {"float32": 1e-5, "float64": 1e-12}
GROUPS = ("1.down: weight_decay=0.3 rate_factor=0.5", "1.kernel: muon=0", "2.head: muon=1")
CONFIG = OptimizerConfig(
    name="muon", momentum=0.95, learning_rate=0.02, warmup_steps=0, decay="constant", groups=GROUPS, weight_decay=0.1
)
SPECS = [
    TensorSpec(0, "table", (11, 7)),
    TensorSpec(1, "qkv", (3, 12, 16), stacked=3),
    TensorSpec(1, "bias", (5,), False),
    TensorSpec(1, "up", (40, 16)),
    TensorSpec(1, "down", (16, 40)),
    TensorSpec(1, "filter", (6, 3, 3, 4)),  # a convolution is a matrix of 6 rows
    TensorSpec(1, "kernel", (8, 8)),
    TensorSpec(1, "experts", (2, 2, 12, 8), stacked=2, expert=True),
    TensorSpec(2, "norm", (7,), False),
    TensorSpec(2, "head", (9, 4)),
]
MATRICES = {"1.qkv": 3, "1.up": 1, "1.down": 1, "1.filter": 1, "1.experts": 4, "2.head": 1}
LAYOUT = Layout.of(SPECS)
ALL = Range(0, LAYOUT.size)


def random_store(rng, dtype, on="cpu"):
    values = FlatStore(LAYOUT, dtype_of(dtype))
    for segment in LAYOUT.segments:
        values.view(segment.key)[...] = rng.standard_normal(segment.spec.shape)
    store = FlatStore(LAYOUT, dtype_of(dtype), on=on)
    store.copy_from(values)
    return store


def update(rule, weights, gradient, working=None):
    rule.begin_step()
    rule.direction(ALL, weights, gradient, 0.5)
    rule.apply(ALL, weights, gradient, working)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_matrices_match_pytorch_and_other_tensors_match_adamw(dtype, rng, monkeypatch):
    torch = pytest.importorskip("torch", reason="PyTorch comes with the extra `reference`")
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor)  # PyTorch would orthogonalise in 16 bits
    rule = optimizer.build(CONFIG, LAYOUT, ALL, dtype_of(dtype), total_steps=UPDATES)
    plain = optimizer.build(replace(CONFIG, name="adamw", groups=()), LAYOUT, ALL, dtype_of(dtype), total_steps=UPDATES)
    assert rule.matrices == set(MATRICES)
    weights = random_store(rng, dtype)
    others = FlatStore(LAYOUT, dtype_of(dtype))
    others.copy_from(weights)

    def stacks(store, key):
        return store.view(key).reshape(MATRICES[key], -1, 40 if key == "1.down" else store.view(key).shape[-1])

    def matrices(store, key):
        return store.view(key).reshape(1, 6, 36) if key == "1.filter" else stacks(store, key)

    tensors = {key: [torch.tensor(matrix.copy()) for matrix in matrices(weights, key)] for key in MATRICES}
    options = {"1.down": {"lr": 0.01, "weight_decay": 0.3}}
    reference = torch.optim.Muon(
        [{"params": tensors[key], **options.get(key, {})} for key in MATRICES],
        lr=0.02,
        momentum=0.95,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    for _ in range(UPDATES):
        gradient, copy = random_store(rng, dtype), FlatStore(LAYOUT, dtype_of(dtype))
        copy.copy_from(gradient)
        for key in MATRICES:
            for tensor, matrix in zip(tensors[key], matrices(gradient, key), strict=True):
                tensor.grad = torch.tensor(0.5 * matrix)
        update(rule, weights, gradient)
        update(plain, others, copy)
        reference.step()
    for key in MATRICES:
        expected = np.stack([tensor.numpy() for tensor in tensors[key]])
        assert np.linalg.norm(matrices(weights, key) - expected) <= BOUNDS[dtype] * np.linalg.norm(expected), key
    rest = [spec.key for spec in SPECS if spec.key not in MATRICES]
    assert all(weights.view(key).tobytes() == others.view(key).tobytes() for key in rest)
    assert not any(rule.slots["v"].holds(LAYOUT.by_key[key].range) for key in MATRICES)


@pytest.mark.parametrize("given", ["float32", "float64", "bfloat16"])
def test_muon_on_a_gpu_matches_the_cpu(gpu, given, rng):
    master = "float64" if given == "float64" else "float32"
    rules = {on: optimizer.build(CONFIG, LAYOUT, ALL, dtype_of(master), total_steps=9, on=on) for on in ("cpu", "gpu")}
    weights = {"cpu": random_store(rng, master)}
    gradients, working = ({on: FlatStore(LAYOUT, dtype_of(given), on=on) for on in ("cpu", "gpu")} for _ in range(2))
    weights["gpu"] = FlatStore(LAYOUT, dtype_of(master), on="gpu")
    weights["gpu"].copy_from(weights["cpu"])
    if given == "bfloat16":
        for on, rule in rules.items():
            rules[on] = MasterWeights(rule, LAYOUT, ALL, ledger=None, on=on)
            rules[on].weights.copy_from(weights["cpu"])
            weights[on] = rules[on].weights
    for _ in range(3):
        gradient = random_store(rng, given)
        for on, rule in rules.items():
            gradients[on].copy_from(gradient)
            gpu.LOG.clear()
            update(rule, working[on] if given == "bfloat16" else weights[on], gradients[on], working[on])
            assert not gpu.LOG.count(gpu.D2H) and not gpu.LOG.count(gpu.H2D)
    host, device = weights["cpu"].array, weights["gpu"].array.get()
    assert np.linalg.norm(device - host) <= BOUNDS[master] * np.linalg.norm(host)
    if given == "bfloat16":
        for segment in LAYOUT.segments:
            values = working["cpu"].range(segment.range)
            assert values.tobytes() == weights["cpu"].range(segment.range).astype(BFLOAT16).tobytes()


def test_orthogonal_matrix_has_singular_values_near_one(rng):
    for rows, columns in ((5, 30), (30, 5), (17, 17), (1, 9), (9, 1)):
        matrix = rng.standard_normal((rows, columns))
        left, _, right = np.linalg.svd(matrix, full_matrices=False)
        muon.orthogonalise(matrix)
        values = np.diag(left.T @ matrix @ right.T)
        assert ((values > 0.3) & (values < 1.3)).all() or rows == columns  # a square matrix has tiny singular values
        np.testing.assert_allclose(left * values @ right, matrix, atol=1e-12)  # with the singular vectors as before
    zero = np.zeros((3, 4), np.float32)
    muon.orthogonalise(zero)
    assert not zero.any()


@cases("layers, owners", (2, 2), (12, 2), (12, 4), (24, 8), (3, 7), (2, 1))
@pytest.mark.parametrize("gated", [False, True])
def test_owned_ranges_have_whole_matrices_and_equal_work(layers, owners, gated):
    options = {"activation": "swiglu", "positions": "rotary", "norm": "rms", "bias": False} if gated else {}
    model = models.build(ModelConfig(layers=layers, hidden=64, heads=2, **options), "float32", context=16)
    config = OptimizerConfig(name="muon")
    names, layout = muon.muon_tensors(config, model.layout), model.layout
    owned = muon.owned_ranges(config, layout, layout.units, owners)
    loads = np.zeros(owners)
    for layer, ranges in owned.items():
        assert len(ranges) == owners and ranges[0].start == layout.units[layer].start
        assert all(before.stop == after.start for before, after in pairwise(ranges))
        assert ranges[-1].stop == layout.units[layer].stop
        for owner, part in enumerate(ranges):
            for segment, touched in layout.within(part):
                if segment.key in names:
                    matrix = np.prod(segment.spec.shape[-2:])
                    assert touched.size % matrix == (touched.start - segment.range.start) % matrix == 0
                    loads[owner] += muon.work(segment.spec) * touched.size / segment.range.size
    assert set(owned) == set(layout.units)
    if layers >= owners:
        assert loads.max() <= 1.1 * loads.mean()
    assert owned[0] == [part.shift(layout.units[0].start) for part in split(layout.units[0].size, owners, 1, 32)]


def test_tensor_ranks_cut_layers_alike():
    whole = TensorSpec(1, "stack", (3, 10, 64), cut=1, stacked=3)
    results = []
    for start, stop in ((0, 4), (4, 7), (7, 10)):
        ends = [TensorSpec(layer, "table", (8, 8)) for layer in (0, 2)]
        specs = [ends[0], whole.shard(Range(start, stop), 4), TensorSpec(1, "down", (64, 64)), ends[1]]
        layout = Layout.of(specs)
        results.append(muon.owned_ranges(OptimizerConfig(name="muon"), layout, layout.units, 3))
    assert results[0] == results[1] == results[2]


@cases(
    "groups, message",
    (("*.bias: muon=1",), "muon=1 matches the tensor 1.bias of shape \\(5,\\)"),
    (("1.*: muon=0",), "no matrix between its first and its last layer"),
    (("1.*: muon=2",), "invalid group"),
    (("1.*: muon=0.0",), "invalid group"),
)
def test_invalid_muon_groups_are_rejected(groups, message):
    with pytest.raises(ConfigurationError, match=message):
        optimizer.build(replace(CONFIG, groups=groups), LAYOUT, ALL, np.dtype(np.float32), total_steps=9)


def test_options_of_muon_are_rejected_for_other_optimizers():
    with pytest.raises(ConfigurationError, match="has the option muon, but optimizer.name = 'adamw'"):
        OptimizerConfig(groups=("1.*: muon=1",))
    with pytest.raises(ConfigurationError, match="muon always uses it"):
        OptimizerConfig(name="muon", nesterov=True)
