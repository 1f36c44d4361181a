"""Every optimizer compared with plain float64 formulas and with optax, for any partition of the flat space."""

import math

import numpy as np
import pytest

from harness.marks import cases
from hpcdist.arrays.backend import Ledger
from hpcdist.arrays.dtypes import BFLOAT16
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.ranges import Range, cut, split
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.optim import base, kernels, norms, optimizer, rates
from hpcdist.optim.config import OptimizerConfig
from stubs.gpu import host_kernels

STEPS = 100
FLOAT64 = np.dtype("float64")
SPECS = [
    TensorSpec(0, "embedding", (7, 5)),
    TensorSpec(1, "scale", (5,), adapted=False),
    TensorSpec(1, "dense", (40, 3)),
    TensorSpec(1, "bias", (3,), adapted=False),
    TensorSpec(1, "zero", (3, 3)),  # starts at 0 and has the gradient 0 in the first half: both norms vanish
    TensorSpec(2, "head", (11, 13)),
]
LAYOUT = Layout.of(SPECS)
# (weight decay, factor of the rate) of tensors in a group: 1.scale and 1.bias are not adapted
GROUPS = ("1.scale *.head: weight_decay=0.3 rate_factor=0.5", "1.bias 2.*: rate_factor=2.0", "0.*: weight_decay=0.0")
OWN = {"1.scale": (0.3, 0.5), "2.head": (0.3, 0.5), "1.bias": (0.0, 2.0), "0.embedding": (0.0, 1.0)}
CONFIGS = {
    "sgd": dict(name="sgd", learning_rate=0.05, momentum=0.9, weight_decay=0.01),
    "sgd-nesterov": dict(name="sgd", learning_rate=0.05, momentum=0.8, nesterov=True, weight_decay=0.01),
    "sgd-plain": dict(name="sgd", learning_rate=0.05, momentum=0.0, weight_decay=0.01),
    "adamw": dict(name="adamw", learning_rate=0.01, weight_decay=0.1, beta1=0.9, beta2=0.95),
    "lars": dict(name="lars", learning_rate=2.0, momentum=0.9, weight_decay=0.01, trust_coefficient=0.02),
    "lars-as-published": dict(
        name="lars",
        learning_rate=2.0,
        momentum=0.9,
        weight_decay=0.01,
        trust_coefficient=0.02,
        momentum_correction=False,
    ),
    "lamb": dict(name="lamb", learning_rate=0.02, weight_decay=0.1, beta1=0.9, beta2=0.99, epsilon=1e-6),
    "adamw-uncorrected": dict(name="adamw", learning_rate=0.01, weight_decay=0.1, bias_correction=False),
    "lamb-uncorrected": dict(name="lamb", learning_rate=0.02, weight_decay=0.1, epsilon=1e-6, bias_correction=False),
    "lamb-bounded": dict(  # the ratios of the three tensors lie below, between and above
        name="lamb", learning_rate=0.02, weight_decay=0.1, epsilon=1e-6, trust_ratio_min=0.9, trust_ratio_max=1.1
    ),
    "adamw-groups": dict(name="adamw", learning_rate=0.01, weight_decay=0.1, groups=GROUPS),
    "sgd-groups": dict(name="sgd", learning_rate=0.05, momentum=0.9, weight_decay=0.01, groups=GROUPS),
    "lars-groups": dict(
        name="lars", learning_rate=2.0, momentum=0.9, weight_decay=0.01, trust_coefficient=0.02, groups=GROUPS
    ),
    "lamb-groups": dict(name="lamb", learning_rate=0.02, weight_decay=0.1, epsilon=1e-6, groups=GROUPS),
}
LAYERWISE = [name for name in CONFIGS if name.startswith(("lars", "lamb"))]
ELEMENTWISE = [name for name in CONFIGS if name not in LAYERWISE]
IN_OPTAX = ["sgd", "sgd-nesterov", "sgd-plain", "adamw", "lars", "lars-as-published", "lamb"]


def config_of(name, **changes):
    return OptimizerConfig(**{"warmup_steps": 10, "decay": "cosine", **CONFIGS[name], **changes})


def start(rng):
    weights = {spec.key: rng.standard_normal(spec.shape) for spec in SPECS}
    weights["1.zero"][...] = 0.0
    return weights


def gradients(rng, weights, steps=STEPS):
    drawn = [{key: rng.standard_normal(w.shape) for key, w in weights.items()} for _ in range(steps)]
    for step in drawn[: steps // 2]:
        step["1.zero"][...] = 0.0
    return drawn


def rate_at(config, t):
    """Return the rate after warm-up and cosine decay, computed independently."""
    if t <= config.warmup_steps:
        return config.learning_rate * t / config.warmup_steps
    x = (t - config.warmup_steps) / (STEPS - config.warmup_steps)
    low = config.final_fraction * config.learning_rate
    return low + (config.learning_rate - low) * (1 + math.cos(math.pi * x)) / 2


def reference(config, weights, drawn, scale=1.0):
    """Return plain per-tensor updates in float64."""
    w = {key: value.copy() for key, value in weights.items()}
    a = {key: np.zeros_like(value) for key, value in w.items()}
    b = {key: np.zeros_like(value) for key, value in w.items()}
    before = None  # the rate of the last update
    for t, step in enumerate(drawn, 1):
        common_rate = rate_at(config, t)
        for spec in SPECS:
            key = spec.key
            g = scale * step[key]
            usual = config.weight_decay if spec.adapted else 0.0
            decay, factor = OWN.get(key, (usual, 1.0)) if config.groups else (usual, 1.0)
            rate = factor * common_rate
            w_norm = np.sqrt(np.sum(w[key] ** 2))
            if config.name == "sgd":
                g = g + decay * w[key]
                a[key] = config.momentum * a[key] + g
                w[key] = w[key] - rate * (g + config.momentum * a[key] if config.nesterov else a[key])
            elif config.name == "lars":
                g_norm = np.sqrt(np.sum(g**2))
                local = 1.0
                if spec.adapted and w_norm > 0 and g_norm > 0:
                    local = config.trust_coefficient * w_norm / (g_norm + decay * w_norm + config.epsilon)
                if config.momentum_correction:
                    a[key] *= common_rate / (before or common_rate)
                a[key] = config.momentum * a[key] + rate * local * (g + decay * w[key])
                w[key] = w[key] - a[key]
            else:
                a[key] = config.beta1 * a[key] + (1 - config.beta1) * g
                b[key] = config.beta2 * b[key] + (1 - config.beta2) * g**2
                start = t if config.bias_correction else np.inf
                corrected = a[key] / (1 - config.beta1**start), b[key] / (1 - config.beta2**start)
                u = corrected[0] / (np.sqrt(corrected[1]) + config.epsilon) + decay * w[key]
                u_norm = np.sqrt(np.sum(u**2))
                layerwise = config.name == "lamb" and spec.adapted and w_norm > 0 and u_norm > 0
                ratio = w_norm / u_norm if layerwise else 1.0
                if layerwise and config.trust_ratio_max:
                    ratio = np.clip(ratio, config.trust_ratio_min, config.trust_ratio_max)
                w[key] = w[key] - rate * ratio * u
        before = common_rate
    return w


class Replica:
    """One owner of a part, with all weights and gradients, as in the allreduce strategy."""

    def __init__(self, config, weights, part, dtype, working=None, whole=True):
        held = None if whole else part
        self.part = part
        self.optimizer = optimizer.build(config, LAYOUT, part, dtype, total_steps=STEPS)
        self.master = FlatStore(LAYOUT, dtype, held)
        self.gradient = FlatStore(LAYOUT, dtype, held)
        self.working = None if working is None else FlatStore(LAYOUT, working, held)
        self.load(self.master, weights)

    def load(self, store, values):
        for segment, where in store.tensors():
            flat = values[segment.key].ravel()
            store.range(where)[...] = flat[where.start - segment.range.start : where.stop - segment.range.start]

    def direct(self, drawn=None, scale=1.0):
        """Make the first half of a step from the present gradients or from ``drawn``. Return its norms."""
        if drawn is not None:
            self.load(self.gradient, drawn)
        self.optimizer.begin_step()
        self.optimizer.direction(self.part, self.master, self.gradient, scale)
        return self.optimizer.partial_norms()

    def step(self, drawn=None, scale=1.0):
        """Make a step and return its norms."""
        norms = self.direct(drawn, scale)
        self.optimizer.apply(self.part, self.master, self.gradient, None, norms)
        return norms

    def tensors(self):
        return {spec.key: self.master.view(spec.key) for spec in SPECS}


def train(config, weights, drawn, parts, dtype=FLOAT64, scale=1.0, longest=10**9, **options):
    """Update a partitioned model over all steps. Return its tensors and the replicas."""
    replicas = [Replica(config, weights, part, dtype, **options) for part in parts]
    for step in drawn:
        for r in replicas:
            r.load(r.gradient, step)
            r.optimizer.begin_step()
            for piece in cut(r.part, longest):
                r.optimizer.direction(piece, r.master, r.gradient, scale)
        norms = sum(r.optimizer.partial_norms() for r in replicas)
        for r in replicas:
            given = norms if r.optimizer.needs_norms else None
            for piece in cut(r.part, longest):
                r.optimizer.apply(piece, r.master, r.gradient, r.working, given)
    whole = FlatStore(LAYOUT, dtype)
    for r in replicas:
        whole.range(r.part)[...] = r.master.range(r.part)
    return {spec.key: whole.view(spec.key) for spec in SPECS}, replicas


def distance(got, expected):
    """Return the norm of the difference, relative to the norm of ``expected``."""
    flat = [np.concatenate([np.ravel(x[key]) for key in expected]).astype(np.float64) for x in (got, expected)]
    return np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1])


def whole_space():
    return [Range(0, LAYOUT.size)]


@pytest.fixture(params=["loops", "gpu"])
def path(request, monkeypatch):
    if request.param == "gpu":
        host_kernels.install(monkeypatch, kernels, base)
        monkeypatch.setattr(base, "place", lambda table, on: table)
        made = base.SegmentWise.__init__

        def make(self, *args, **keywords):
            made(self, *args, **keywords)
            self._options = self._options_on_gpu()
            if self.needs_norms:
                self._norms = norms.GpuNorms(self.layout.size, self._options)

        monkeypatch.setattr(base.SegmentWise, "__init__", make)
    return request.param


@pytest.mark.parametrize("name", CONFIGS)
def test_optimizers_match_the_plain_formula_over_100_steps(rng, name, path):
    config, weights = config_of(name), start(rng)
    drawn = gradients(rng, weights)
    got, _ = train(config, weights, drawn, whole_space(), scale=0.75)
    expected = reference(config, weights, drawn, scale=0.75)
    assert distance(got, expected) < 1e-12
    for key in expected:
        np.testing.assert_allclose(got[key], expected[key], rtol=1e-11, atol=1e-12, err_msg=key)


@cases(
    "text, output",
    ("*.bias", "write patterns"),
    ("*.bias:", "write patterns"),
    (": weight_decay=0", "write patterns"),
    ("*: momentum=0.5", "write patterns"),
    ("*: weight_decay=-1", "write patterns"),
    ("*: weight_decay=nan", "write patterns"),
    ("*: weight_decay=1 weight_decay=2", "write patterns"),
    ("9.*: weight_decay=0", "in optimizer.groups matches no tensor"),
)
def test_invalid_parameter_groups_are_rejected(text, output):
    with pytest.raises(ConfigurationError, match=output):
        optimizer.build(config_of("adamw", groups=(text,)), LAYOUT, whole_space(), FLOAT64, total_steps=STEPS)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.full
def test_any_partition_gives_the_same_result(rng, name, parts):
    config, weights = config_of(name), start(rng)
    drawn = gradients(rng, weights)
    expected = reference(config, weights, drawn)
    aligned = split(LAYOUT.size, parts, 8)
    bounds = [0, *sorted(rng.integers(0, LAYOUT.size + 1, parts - 1).tolist()), LAYOUT.size]  # also empty parts
    for cuts, full in ((aligned, True), ([Range(a, b) for a, b in zip(bounds, bounds[1:], strict=False)], False)):
        got, replicas = train(config, weights, drawn, cuts, longest=37, whole=full)
        assert distance(got, expected) < 1e-12
        assert all(slot.parts == ((r.part,) if r.part else ()) for r in replicas for slot in r.optimizer.slots.values())


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_are_bit_identical_for_any_partition(rng, name):
    config, weights = config_of(name), start(rng)
    drawn = gradients(rng, weights, 20)
    one, _ = train(config, weights, drawn, whole_space(), np.dtype("float32"))
    three, _ = train(config, weights, drawn, split(LAYOUT.size, 3, 4), np.dtype("float32"), longest=11)
    assert all(np.array_equal(one[key], three[key]) for key in one)


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_master_stays_close_and_keeps_its_dtype(rng, name, path):
    config, weights = config_of(name), start(rng)
    drawn = gradients(rng, weights)
    got, replicas = train(config, weights, drawn, whole_space(), np.dtype("float32"))
    assert distance(got, reference(config, weights, drawn)) < 1e-5
    assert all(slot.dtype == np.float32 for slot in replicas[0].optimizer.slots.values())


@pytest.mark.parametrize("working", [BFLOAT16, np.dtype("float16"), np.dtype("float32")], ids=str)
def test_working_copy_is_the_master_rounded_once(rng, working, path):
    config, weights = config_of("adamw"), start(rng)
    drawn = gradients(rng, weights, 20)
    with_copy, replicas = train(config, weights, drawn, whole_space(), np.dtype("float32"), working=working)
    without, _ = train(config, weights, drawn, whole_space(), np.dtype("float32"))
    for key, value in with_copy.items():
        assert np.array_equal(value, without[key])
        assert np.array_equal(replicas[0].working.view(key), value.astype(working))


def test_master_keeps_updates_that_bfloat16_would_lose():
    config = OptimizerConfig(name="sgd", momentum=0.0, learning_rate=1e-3, warmup_steps=0, decay="constant")
    layout = Layout.of([TensorSpec(0, "w", (4,), adapted=False)])
    master, gradient = FlatStore(layout, np.dtype("float32")), FlatStore(layout, np.dtype("float32"))
    working = FlatStore(layout, BFLOAT16)
    piece = Range(0, layout.size)
    sgd = optimizer.build(config, layout, piece, np.dtype("float32"), total_steps=10)
    master.view("0.w")[...] = 1.0
    for _ in range(10):
        gradient.view("0.w")[...] = 1.0
        sgd.begin_step()
        sgd.direction(piece, master, gradient)
        sgd.apply(piece, master, gradient, working)
    np.testing.assert_allclose(master.view("0.w"), 0.99, rtol=1e-6)
    assert np.all(working.view("0.w").astype(np.float32) < 1.0)
    assert np.all((np.ones(4, BFLOAT16) - np.full(4, 1e-3, BFLOAT16)) == 1.0)  # the update alone would have vanished


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_is_neither_read_nor_written(rng, name):
    config, weights = config_of(name), start(rng)
    replica = Replica(config, weights, whole_space()[0], FLOAT64)
    inside = np.zeros(LAYOUT.size, bool)
    for segment in LAYOUT.segments:
        inside[segment.range.slice] = True
    replica.master.array[~inside] = replica.gradient.array[~inside] = np.nan
    norms = replica.step(gradients(rng, weights, 1)[0])
    assert np.isfinite(norms).all() and np.isfinite(replica.master.array[inside]).all()
    assert np.isnan(replica.master.array[~inside]).all()
    assert all(not slot.array[~inside].any() for slot in replica.optimizer.slots.values())


def test_partial_norms_match_the_definition_in_every_step(rng):
    weights = start(rng)
    drawn = gradients(rng, weights, 2)
    for name in LAYERWISE:
        replica = Replica(config_of(name), weights, whole_space()[0], FLOAT64)
        for step in drawn:  # no apply: the weights stay
            norms = replica.direct(step, 0.5)
            assert norms.shape == (len(SPECS), 2) and norms.dtype == np.float64
            for spec, row in zip(SPECS, norms, strict=True):
                after = replica.gradient.view(spec.key)
                if name.startswith("lars"):
                    np.testing.assert_allclose(after, 0.5 * step[spec.key])
                expected = (np.sum(weights[spec.key] ** 2), np.sum(after**2)) if spec.adapted else (0.0, 0.0)
                np.testing.assert_allclose(row, expected, rtol=1e-13)
    assert not optimizer.build(config_of("adamw"), LAYOUT, whole_space()[0], FLOAT64, total_steps=1).needs_norms


@pytest.mark.parametrize("name", CONFIGS)
def test_restored_optimizer_continues_with_the_same_bits(rng, name):
    config, weights = config_of(name), start(rng)
    drawn = gradients(rng, weights, 12)
    expected, _ = train(config, weights, drawn, whole_space())
    middle, (before,) = train(config, weights, drawn[:7], whole_space())
    after = Replica(config, middle, whole_space()[0], FLOAT64)
    after.optimizer.restore(before.optimizer.state())
    assert after.optimizer.count == 7
    for slot, store in before.optimizer.slots.items():
        after.optimizer.slots[slot].array[...] = store.array
    for step in drawn[7:]:
        after.step(step)
    assert all(np.array_equal(after.master.view(key), expected[key]) for key in expected)


def test_optimizer_state_is_counted_for_the_owned_part():
    ledger = Ledger()
    part = Range(32, 96)
    built = optimizer.build(config_of("adamw"), LAYOUT, part, np.dtype("float32"), total_steps=1, ledger=ledger)
    assert set(built.slots) == {"m", "v"}
    assert ledger.current["optimizer"] == 2 * 4 * part.size


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype("float16")], ids=str)
def test_16_bit_master_is_rejected(dtype):
    with pytest.raises(UsageError, match="float32 or float64"):
        optimizer.build(config_of("sgd"), LAYOUT, whole_space()[0], dtype, total_steps=1)


FACTORS = [0.2, 0.4, 0.6, 0.8, 1.0, 0.82, 0.64, 0.46, 0.28, 0.1]


def _optax_transform(optax, name, config, mask):
    rate = config.learning_rate
    if name == "adamw":
        return optax.adamw(
            rate, config.beta1, config.beta2, config.epsilon, weight_decay=config.weight_decay, mask=mask
        )

    def schedule(count):
        import jax

        return rate * jax.numpy.asarray(FACTORS)[count]

    # optax uses the norm of g + decay w, the paper the norm of g: they agree without decay.
    if name == "lars-as-published":
        ratio = dict(trust_coefficient=config.trust_coefficient, eps=config.epsilon, trust_ratio_mask=mask)
        return optax.lars(schedule, 0.0, momentum=config.momentum, **ratio)
    if name == "lars":  # a velocity that knows no rates
        ratio = optax.scale_by_trust_ratio(trust_coefficient=config.trust_coefficient, eps=config.epsilon)
        rates = optax.scale_by_learning_rate(schedule)
        return optax.chain(optax.masked(ratio, mask), optax.trace(config.momentum), rates)
    if name == "lamb":  # as optax.lamb, which has no mask for the ratio
        return optax.chain(
            optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
            optax.add_decayed_weights(config.weight_decay, mask),
            optax.masked(optax.scale_by_trust_ratio(), mask),
            optax.scale_by_learning_rate(rate),
        )
    return optax.chain(
        optax.add_decayed_weights(config.weight_decay, mask), optax.sgd(rate, config.momentum or None, config.nesterov)
    )


@pytest.mark.parametrize("name", IN_OPTAX)
@pytest.mark.full
def test_optimizers_match_optax(rng, name, monkeypatch):
    optax = pytest.importorskip("optax", reason="optax comes with the extra `reference`")
    jax = pytest.importorskip("jax")
    changes = {"warmup_steps": 0, "decay": "constant"}
    if name.startswith("lars"):
        changes["weight_decay"] = 0.0
        monkeypatch.setattr(rates, "learning_rate", lambda config, t, total: config.learning_rate * FACTORS[t - 1])
    config, weights = config_of(name, **changes), start(rng)
    drawn = gradients(rng, weights, 10)
    got, _ = train(config, weights, drawn, split(LAYOUT.size, 3, 8))
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        transform = _optax_transform(optax, name, config, {spec.key: spec.adapted for spec in SPECS})
        params = {key: jax.numpy.asarray(value) for key, value in weights.items()}
        state = transform.init(params)
        update = jax.jit(transform.update)
        for step in drawn:
            updates, state = update(step, state, params)
            params = optax.apply_updates(params, updates)
        assert params["0.embedding"].dtype == np.float64
        assert distance(got, params) < 1e-12
    finally:
        jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("name", ["sgd", "sgd-nesterov", "sgd-plain", "adamw"])
def test_optimizers_match_torch(rng, name):
    torch = pytest.importorskip("torch", reason="PyTorch comes with the extra `reference`")
    config, weights = config_of(name, warmup_steps=0, decay="constant"), start(rng)
    drawn = gradients(rng, weights, 20)
    got, _ = train(config, weights, drawn, whole_space())
    theirs = {key: torch.tensor(value) for key, value in weights.items()}
    groups = [
        {"params": [theirs[s.key] for s in SPECS if s.adapted == adapted], "weight_decay": decay}
        for adapted, decay in ((True, config.weight_decay), (False, 0.0))
    ]
    if name == "adamw":
        make = torch.optim.AdamW(groups, config.learning_rate, (config.beta1, config.beta2), config.epsilon)
    else:
        make = torch.optim.SGD(groups, config.learning_rate, config.momentum, nesterov=config.nesterov)
    for step in drawn:
        for key, tensor in theirs.items():
            tensor.grad = torch.tensor(step[key])
        make.step()
    assert distance(got, {key: tensor.numpy() for key, tensor in theirs.items()}) < 1e-12


@pytest.mark.parametrize("name", LAYERWISE)
def test_trust_ratio_is_one_if_a_norm_is_zero(name):
    built = optimizer.build(config_of(name), LAYOUT, whole_space()[0], FLOAT64, total_steps=1)
    assert [built._ratio(*norms, 0.0) for norms in ((0.0, 1.0), (1.0, 0.0), (0.0, 0.0))] == [1.0, 1.0, 1.0]
    assert built._ratio(2.0, 4.0, 0.0) != 1.0


def test_lamb_ratio_stays_within_its_bounds():
    def ratio(*norms, **options):
        config = config_of("lamb", **options)
        return optimizer.build(config, LAYOUT, whole_space()[0], FLOAT64, total_steps=1)._ratio(*norms, 0.0)

    both = {"trust_ratio_min": 0.01, "trust_ratio_max": 10.0}  # DeepSpeed's
    assert [ratio(w, 1.0, **both) for w in (1e-3, 0.5, 300.0)] == [0.01, 0.5, 10.0]
    assert [ratio(w, 1.0, trust_ratio_max=2.0) for w in (1e-3, 300.0)] == [1e-3, 2.0]
    assert [ratio(w, 1.0, trust_ratio_min=2.0) for w in (1e-3, 300.0)] == [2.0, 300.0]
    assert ratio(1.0, 1e-40) == 1.0 and ratio(1.0, 1e-40, **both) == 10.0


@pytest.mark.parametrize("name", LAYERWISE)
def test_layer_wise_rates_of_extreme_tensors_in_float32(name):
    """Tensors have squares beyond float32, tiny norms, a single element, or zeros with decay."""
    specs = [TensorSpec(0, key, shape) for key, shape in (("huge", (2, 3)), ("tiny", (2, 3)), ("one", (1, 1)))]
    specs.append(TensorSpec(0, "zero", (2, 2)))
    layout = Layout.of(specs)
    piece, after = Range(0, layout.size), {}
    given = {"huge": (1e25, 1e17), "tiny": (1e-30, 1e-42), "one": (-3.0, 2.0), "zero": (0.0, 1.0)}
    for dtype in (FLOAT64, np.dtype("float32")):
        built = optimizer.build(config_of(name, warmup_steps=0, groups=()), layout, piece, dtype, total_steps=STEPS)
        weights, gradient = FlatStore(layout, dtype), FlatStore(layout, dtype)
        for key, (w, g) in given.items():
            weights.view(f"0.{key}")[...], gradient.view(f"0.{key}")[...] = w, g
        built.begin_step()
        built.direction(piece, weights, gradient)
        norms = built.partial_norms()
        assert norms[0, 0] == pytest.approx(6 * 1e50, rel=1e-6)  # beyond float32
        built.apply(piece, weights, gradient, None, norms)
        after[dtype.name] = {spec.key: weights.view(spec.key) for spec in specs}
    for spec in specs:
        assert (after["float64"][spec.key] != given[spec.name][0]).all() or (spec.name == "tiny" and "lars" in name)
        np.testing.assert_allclose(after["float32"][spec.key], after["float64"][spec.key], rtol=1e-5)


def test_momentum_correction_rescales_the_velocity_to_the_rate(rng):
    """The reference is a velocity without rates.

    One case changes the schedule, like a resumed run with another schedule.
    """
    weights = start(rng)
    drawn = gradients(rng, weights, 12)
    config, other = config_of("lars", weight_decay=0.0), config_of("lars", weight_decay=0.0, learning_rate=0.1)
    replica = Replica(config, weights, whole_space()[0], FLOAT64)
    w = {key: value.copy() for key, value in weights.items()}
    v = {key: np.zeros_like(value) for key, value in w.items()}
    for t, step in enumerate(drawn, 1):
        if t == 7:  # go on with a rate 20 times lower
            after = Replica(other, replica.tensors(), whole_space()[0], FLOAT64)
            after.optimizer.restore(replica.optimizer.state())
            after.optimizer.slots["momentum"].array[...] = replica.optimizer.slots["momentum"].array
            replica = after
        rate = rate_at(config if t < 7 else other, t)
        for spec in SPECS:
            g = step[spec.key]
            norms = np.linalg.norm(w[spec.key]), np.linalg.norm(g)
            local = config.trust_coefficient * norms[0] / (norms[1] + config.epsilon)
            v[spec.key] = 0.9 * v[spec.key] + (local if spec.adapted and all(norms) else 1.0) * g
            w[spec.key] = w[spec.key] - rate * v[spec.key]
        replica.step(step)
        assert replica.optimizer.learning_rate == pytest.approx(rate)
    assert distance(replica.tensors(), w) < 1e-12


def test_state_without_a_rate_uses_the_rate_of_the_schedule(rng):
    built = optimizer.build(config_of("lars"), LAYOUT, whole_space()[0], FLOAT64, total_steps=STEPS)
    built.restore({"count": 4})
    built.begin_step()
    assert built._correction == pytest.approx(5 / 4)  # of a warm-up over 10
    built.restore({"count": 0})
    built.begin_step(0.5)  # a stale gradient's
    assert built._correction == 1.0 and built.state() == {"count": 1, "rate": 0.5 * 2.0 / 10}
    built.begin_step()
    assert built._correction == pytest.approx(4.0)


def test_normalized_gradient_does_not_depend_on_its_scale(rng):
    """Every update divides the gradient by its norm, as NVLAMB does. The oracle and scaled gradients agree."""
    config, weights = config_of("lamb", epsilon=1e-3), start(rng)
    drawn = gradients(rng, weights, 8)
    normalized = []
    for step in drawn:
        norm = math.sqrt(sum(float(np.sum(g**2)) for g in step.values()))
        normalized.append({key: g / norm for key, g in step.items()})
        assert norms.clip_scale(norm**2, 0.0, normalize=True) == pytest.approx(1 / norm)
        assert norms.clip_scale(norm**2, 5.0, normalize=True) == pytest.approx(1 / norm)
        assert norms.clip_scale(norm**2, 0.25, normalize=True) == pytest.approx(0.25 / norm)
    expected = reference(config, weights, normalized)
    replica = Replica(config, weights, whole_space()[0], FLOAT64)
    for step, factor in zip(drawn, np.geomspace(1e-3, 1e3, len(drawn)), strict=True):
        replica.load(replica.gradient, {key: factor * g for key, g in step.items()})
        scale = norms.clip_scale(norms.sum_of_squares(replica.gradient), 1.0, normalize=True)
        replica.step(scale=scale)
    assert distance(replica.tensors(), expected) < 1e-12
    assert [norms.clip_scale(norm**2, 1.0, normalize=True) for norm in (0.0, 1e-31)] == [1.0, 1.0]


@cases(
    "config",
    OptimizerConfig(),
    OptimizerConfig(name="sgd"),
    OptimizerConfig(name="sgd", momentum=0.0),
    ids=["adamw", "sgd", "plain"],
)
def test_weights_may_change_between_the_two_phases_of_a_step(config, rng):
    """A change of the weights between the two phases is added to the result and does not change the step."""
    layout = Layout.of([TensorSpec(0, "weight", (40, 3)), TensorSpec(0, "bias", (7,), False)])
    whole, result = Range(0, layout.size), []
    start, gradient, moved = rng.standard_normal((3, layout.size))
    for before in (False, True):
        stores = [FlatStore(layout, np.dtype("float64")) for _ in range(2)]
        stores[0].array[...] = start
        made = optimizer.build(config, layout, whole, np.dtype("float64"), total_steps=9)
        if before:
            made.direct_before()
        for step in range(3):
            stores[1].array[...] = gradient * (step + 1)
            made.begin_step()
            made.direction(whole, *stores, 0.5)
            if before and step == 2:
                stores[0].array[...] += moved
            made.apply(whole, *stores)
        result.append(stores[0].array)
    for segment in layout.segments:
        where = segment.range.slice
        np.testing.assert_allclose(result[1][where], result[0][where] + moved[where], rtol=1e-12)
