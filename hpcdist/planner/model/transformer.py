"""Count the units of a transformer: parameters, matrix products, attention and memory traffic of each block.

For a sample of s tokens, a block of width h, q columns of queries, k columns of keys, inner width f, and f' = 2 f if
gated, else f:

    products    (s, h) x (h, q + 2 k), (s, q) x (q, h), (s, h) x (h, f'), (s, f) x (f, h)
    moved       two norms 4 s h, two residual sums 6 s h, the activation s (f' + f), rotary queries and keys
                2 s (q + k), their norms as much, dropout 2 s h each
    parameters  as in `hpcdist.models.counts`; e experts add a router of h e and e feed-forwards

Each elementwise operation counts as one kernel that reads its inputs and writes its output once. The last two products
and the activation are counted for each expert of a token.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any, Final

from hpcdist.errors import ConfigurationError
from hpcdist.models import counts
from hpcdist.models.config import FOREIGN, TRANSFORMERS, ModelConfig
from hpcdist.models.counts import UnitCounts as Counted
from hpcdist.models.counts import attention_pairs
from hpcdist.models.layers.convolution import SIZE
from hpcdist.planner.model.description import (
    AttentionShape,
    ModelDescription,
    ModelUnit,
    ProductShape,
    TransformerShape,
)

ABOUT: Final = ("source", "printed", "but")  # keys that are not fields of a shape
STORED_BYTES: Final = 4  # per feature
# Fields that TransformerShape and ModelConfig share.
_COMMON: Final = (
    *("layers", "hidden", "heads", "vocabulary", "tied", "dropout", "positions", "norm", "kv_heads", "window", "bias"),
    *("head_size", "query_key_norm", "window_layers", "biased", "shared_experts"),
)


def describe(shape: TransformerShape, name: str, documents: counts.DocumentPairs | None = None) -> ModelDescription:
    """Return the description of a transformer of the sizes ``shape``. Raises ConfigurationError for invalid sizes.

    ``name``: name of the model in reports. ``documents``: query-key pairs of packed samples, or None if not packed.
    """
    _check(shape)
    config = config_of(shape)
    units = _embedding(shape, config), _block(shape, config, documents), _head(shape, config)
    return ModelDescription(
        name=name,
        units=units,
        tokens=shape.context,
        width=shape.hidden,
        tied_parameters=shape.vocabulary * shape.hidden if shape.tied else 0,
        shape=shape,
    )


def of_config(
    config: ModelConfig,
    *,
    context: int = 0,  # tokens per sample, for transformers
    features: int = 0,  # for an mlp, like ``classes``
    height: int = 0,  # for a convnet, like width, channels and classes
    width: int = 0,
    channels: int = 0,
    classes: int = 0,
    documents: counts.DocumentPairs | None = None,  # statistics of the documents in packed samples
) -> ModelDescription:
    """Return the description of the model in the recipe section ``config``. Raises ConfigurationError."""
    if config.kind in FOREIGN:
        raise ConfigurationError(
            f"model.kind = {config.kind!r}: the planner does not know the layers of this model, because "
            "user code creates the layers; give the sizes of a similar transformer, or the name of a published model"
        )
    if config.kind in TRANSFORMERS:
        _positive(f"data.context, which a model of kind {config.kind!r} needs,", context)
        return describe(_shape_of(config, context), config.kind, documents)
    if config.kind == "mlp":
        _positive("data.features, which an mlp needs,", features)
        _positive("classes", classes)
        widths = [features] + [config.hidden] * config.layers + [classes]
        counted = counts.counts(config, features=features, classes=classes).units
        numbers = features
        units = [
            _dense(counted_unit, wide, last=number == config.layers)
            for number, (counted_unit, wide) in enumerate(
                zip(counted, zip(widths, widths[1:], strict=False), strict=True)
            )
        ]
    else:
        for name, value in (("height", height), ("width", width), ("channels", channels), ("classes", classes)):
            _positive(f"{name} of a picture, which a convnet needs,", value)
        counted = counts.counts(config, height=height, width=width, channels=channels, classes=classes).units
        numbers = height * width * channels
        units = list(_convolutions(config, counted, channels))
    largest = max(product.columns * product.rows for unit in units for product in unit.products)
    merged = tuple(replace(unit, count=len(list(copies))) for unit, copies in groupby(units))
    return ModelDescription(
        name=config.kind, units=merged, tokens=1, width=largest, sample_bytes=STORED_BYTES * numbers
    )


def config_of(shape: TransformerShape) -> ModelConfig:
    """Return the recipe section [model] that describes a transformer of the sizes ``shape``."""
    values: dict[str, Any] = {name: getattr(shape, name) for name in _COMMON}
    if shape.experts == 1:
        values["shared_experts"] = 0
    else:
        values |= {"experts": shape.experts, "experts_per_token": shape.experts_per_token}
    return ModelConfig(
        kind="gpt" if shape.causal else "encoder",
        activation="swiglu" if shape.gated else "gelu",
        feed_forward=inner(shape),
        **values,
    )


def inner(shape: TransformerShape) -> int:
    """Return the inner width of a feed-forward layer, or of one expert, in a transformer of the sizes ``shape``."""
    like = ModelConfig(hidden=shape.hidden, heads=1, activation="swiglu" if shape.gated else "gelu")
    return shape.feed_forward or like.inner


def _shape_of(config: ModelConfig, context: int) -> TransformerShape:
    values: dict[str, Any] = {name: getattr(config, name) for name in _COMMON}
    return TransformerShape(
        context=context,
        feed_forward=config.expert_inner,
        experts=max(1, config.experts),
        experts_per_token=config.experts_per_token if config.experts else 1,
        gated=config.activation == "swiglu",
        causal=config.kind == "gpt",
        **values,
    )


def _embedding(shape: TransformerShape, config: ModelConfig) -> ModelUnit:
    counted = counts.embedding_counts(config, shape.context)
    wide = shape.context * shape.hidden
    learned = shape.positions == "learned"
    return ModelUnit(
        name="embedding",
        count=1,
        parameters=counted.parameters,
        cut_parameters=shape.vocabulary * shape.hidden,
        moved=wide * (2 + 2 * learned + 2 * bool(shape.dropout)),
        kernels=1 + learned + bool(shape.dropout),
        first=True,
        counted=counted,
    )


def _block(shape: TransformerShape, config: ModelConfig, documents: counts.DocumentPairs | None) -> ModelUnit:
    hidden, tokens, wide = shape.hidden, shape.context, inner(shape)
    kv, query = config.kv_width, config.query_width
    rises = 2 * wide if shape.gated else wide
    routed = shape.experts, shape.experts_per_token / shape.experts
    router = (ProductShape(tokens, hidden, shape.experts),) if shape.experts > 1 else ()
    biased = config.has_bias("feed_forward")
    expert = hidden * rises + wide * hidden + (rises + hidden if biased else 0)
    expert_cut = hidden * rises + wide * hidden + (rises if biased else 0)
    attention_cut = hidden * (query + 2 * kv) + query * hidden + (query + 2 * kv) * config.has_bias("qkv")
    normed = config.query_key_norm != "none"
    rest = (
        hidden * config.has_bias("projection")
        + 2 * counts.norm_statistics(config) * hidden
        + 2 * config.head_width * normed
        + hidden * shape.experts * bool(router)
    )
    dropped = 4 if shape.dropout else 0
    turned = 2 * (query + kv) * ((shape.positions == "rotary") + normed)
    shared = shape.shared_experts
    common = (
        ProductShape(tokens, hidden, shared * rises, "columns"),
        ProductShape(tokens, shared * wide, hidden, "inner"),
    )
    rest += hidden if shared and biased else 0
    attention_cut += shared * (expert_cut if shared else 0)
    often = shape.experts_per_token + shared
    return ModelUnit(
        name="block",
        count=shape.layers,
        parameters=attention_cut + rest + shape.experts * expert,
        cut_parameters=attention_cut + shape.experts * expert_cut,
        expert_parameters=shape.experts * expert if shape.experts > 1 else 0,
        products=(
            ProductShape(tokens, hidden, query + 2 * kv, "columns"),
            ProductShape(tokens, query, hidden, "inner"),
            *router,
            ProductShape(tokens, hidden, rises, "columns", *routed),
            ProductShape(tokens, wide, hidden, "inner", *routed),
            *(common if shared else ()),
        ),
        attention=AttentionShape(
            heads=shape.heads,
            kv_heads=shape.kv_heads or shape.heads,
            size=config.head_width,
            context=tokens,
            pairs=documents.seen if documents else _mean_pairs(config, tokens),
            window=0 if shape.window_layers else shape.window,
            within=documents.every if documents else 0.0,
        ),
        moved=tokens * ((10 + dropped) * hidden + turned + often * (rises + wide)),
        moved_cut=tokens * (turned + often * (rises + wide)),
        kernels=12 + (2 if shape.dropout else 0) + (1 if turned else 0) + (3 if router else 0),
        counted=counts.block_counts(config, tokens, documents),
    )


def _mean_pairs(config: ModelConfig, tokens: int) -> int:
    # Query-key pairs of a block, as a mean over the blocks.
    windows = [config.window_of(block) for block in range(1, config.layers + 1)] if config.window_layers else []
    pairs = [
        attention_pairs(tokens, causal=config.kind == "gpt", window=window) for window in windows or [config.window]
    ]
    return round(sum(pairs) / len(pairs))


def _head(shape: TransformerShape, config: ModelConfig) -> ModelUnit:
    counted = counts.head_counts(config, shape.context)
    wide, words = shape.context * shape.hidden, shape.context * shape.vocabulary
    return ModelUnit(
        name="head",
        count=1,
        parameters=counted.parameters,
        cut_parameters=0 if shape.tied else shape.vocabulary * shape.hidden,
        products=(ProductShape(shape.context, shape.hidden, shape.vocabulary, "columns"),),
        # Norm, and a softmax that reads the logits twice and writes them once.
        moved=2 * wide + 3 * words,
        moved_cut=3 * words,
        kernels=4,
        counted=counted,
    )


def _dense(counted: Counted, widths: tuple[int, int], *, last: bool) -> ModelUnit:
    inputs, outputs = widths
    return ModelUnit(
        name="head" if last else "layer",
        count=1,
        parameters=counted.parameters,
        products=(ProductShape(1, inputs, outputs),),
        moved=(3 if last else 2) * outputs,
        kernels=2,
        first=counted.first,
        counted=counted,
    )


def _convolutions(config: ModelConfig, counted: Sequence[Counted], channels: int) -> Iterator[ModelUnit]:
    before = channels
    for layer, unit in enumerate(counted[:-1]):
        outputs = config.hidden << layer // 2
        window = SIZE * SIZE * before
        pixels = unit.linear // (2 * window * outputs)
        # Unfolded windows are written and read; then norm and activation.
        moved = pixels * (2 * window + 5 * outputs)
        yield ModelUnit(
            name="convolution",
            count=1,
            parameters=unit.parameters,
            products=(ProductShape(pixels, window, outputs),),
            moved=moved,
            kernels=4,
            first=unit.first,
            counted=unit,
        )
        before = outputs
    head = counted[-1]
    classes = head.linear // (2 * before)
    yield ModelUnit(
        name="head",
        count=1,
        parameters=head.parameters,
        products=(ProductShape(1, before, classes),),
        moved=before + 3 * classes,
        kernels=3,
        counted=head,
    )


def _positive(label: str, value: int) -> None:
    if value < 1:
        raise ConfigurationError(f"the size {label} is {value}, but must be at least 1")


def _check(shape: TransformerShape) -> None:
    for name in ("layers", "hidden", "heads", "vocabulary", "context", "experts", "experts_per_token"):
        _positive(f"{name} of the model", getattr(shape, name))
    if shape.experts_per_token > shape.experts:
        raise ConfigurationError(
            f"experts_per_token of the model is {shape.experts_per_token}; it must be at most experts = {shape.experts}"
        )


def names() -> tuple[str, ...]:
    """Return the names of the published models."""
    return tuple(_table())


def named(name: str) -> TransformerShape:
    """Return the sizes of the published model ``name``. Raises ConfigurationError if `names` lacks ``name``."""
    entry = _entry(name)
    return TransformerShape(**{key: value for key, value in entry.items() if key not in ABOUT})


def _entry(name: str) -> Mapping[str, Any]:
    table = _table()
    key = name.lower()
    if key not in table:
        near = get_close_matches(key, table, n=3, cutoff=0.5)
        suggestion = f"the nearest names are {' and '.join(near)}" if near else f"choose one of {', '.join(table)}"
        raise ConfigurationError(
            f"there is no published model {name!r}; {suggestion}, or give the sizes of the model (layers, hidden, ...)"
        )
    return table[key]


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    text = files("hpcdist.planner").joinpath("models.toml").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = tomllib.loads(text)
    accepted = {item.name for item in fields(TransformerShape)} | set(ABOUT)
    for name, entry in table.items():
        unknown = set(entry) - accepted
        assert not unknown, f"models.toml: {name} has unknown keys {sorted(unknown)}"
    return table
