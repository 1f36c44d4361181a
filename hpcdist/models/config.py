"""The ``[model]`` section of a recipe. Imports only `reporting`."""

import math
import re
from dataclasses import dataclass, fields
from typing import Final

from hpcdist.reporting.rules import NO_EFFECT, Condition, Rule, no_effect, other_than, rule
from hpcdist.reporting.schema import check_section, key

TRANSFORMERS: Final = ("gpt", "encoder")
BUILT: Final = (*TRANSFORMERS, "mlp", "convnet")
FOREIGN: Final = ("import", "given")
KINDS: Final = (*BUILT, *FOREIGN)
ACTIVATIONS: Final = ("gelu", "relu", "swiglu")
POSITIONS: Final = ("learned", "rotary")
NORMS: Final = ("layer", "rms")
SCALINGS: Final = ("none", "linear", "llama3", "yarn")
BIASED: Final = ("all", "qkv", "attention", "feed_forward")
ROUTERS: Final = ("softmax", "sigmoid")
# Limits far above any model, so that a mistyped size is rejected before memory is allocated.
MOST: Final = {"layers": 10_000, "hidden": 1 << 20, "vocabulary": 1 << 30}
MOST_CONTEXT: Final = 1 << 27  # tokens per sample
MOST_EXPERTS: Final = 1 << 16
EPSILON: Final = 1e-5  # default of the norms
ROUND_UP: Final = 32  # the default feed-forward width of "swiglu" is a multiple of this

# Keys that only some kinds of models use.
_ONLY: Final = {
    "tied": TRANSFORMERS,
    "positions": TRANSFORMERS,
    **dict.fromkeys(
        ("head_size", "rotary_base", "rotary_scaling", "rotary_factor", "rotary_context", "rotary_slow", "rotary_fast"),
        TRANSFORMERS,
    ),
    **dict.fromkeys(("rotary_magnitude", "rotary_layers", "biased", "query_key_norm"), TRANSFORMERS),
    "norm": (*TRANSFORMERS, "convnet"),
    "norm_epsilon": (*TRANSFORMERS, "convnet"),
    "kv_heads": TRANSFORMERS,
    "window": ("gpt",),
    "window_layers": ("gpt",),
    "feed_forward": TRANSFORMERS,
    "bias": TRANSFORMERS,
    "mask_token": ("encoder",),
    "factory": ("import",),
    "experts": TRANSFORMERS,
}
# Keys that only a mixture of experts uses; models without experts must have the defaults.
EXPERT_KEYS: Final = (
    *("experts_per_token", "shared_experts", "expert_hidden", "router"),
    *("capacity_factor", "balance_loss", "z_loss", "balance_rate"),
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Section ``[model]``: the architecture and the sizes of the model.

    Kinds:
        gpt: ``layers`` decoder blocks of width ``hidden`` with ``heads`` heads, trained to predict the next token.
        encoder: The same blocks without a causal mask, trained to predict masked tokens.
        mlp: ``layers`` hidden layers of width ``hidden``.
        convnet: ``layers`` convolutions, the first with ``hidden`` channels.
        import: A model in PyTorch or JAX (`hpcdist.adapters`), made by the function ``factory``: "file.py:function" or
            "package.module:function".
        given: The model of a script (`hpcdist.training.script`).

    Sources: "rotary": Su et al., arXiv:2104.09864. "rms": Zhang, Sennrich, arXiv:1910.07467. ``kv_heads``: Ainslie et
    al., arXiv:2305.13245. ``window``: Jiang et al., arXiv:2310.06825. "swiglu": Shazeer, arXiv:2002.05202. Formulas of
    the experts: `hpcdist.models.experts.router`.
    """

    kind: str = key(
        "gpt",
        "Architecture. encoder predicts masked tokens; import calls factory; given is a script's model.",
        choices=KINDS,
    )
    layers: int = key(4, "Number of blocks, hidden layers (mlp) or convolutions (convnet).", ge=1, le=MOST["layers"])
    hidden: int = key(
        128, "Width of a block or hidden layer; channels of the first convolution.", ge=1, le=MOST["hidden"]
    )
    heads: int = key(4, "Number of attention heads. Must divide hidden, if head_size is 0.", ge=1, le=MOST["hidden"])
    head_size: int = key(0, "Width of an attention head. 0: hidden / heads.", ge=0, le=MOST["hidden"])
    vocabulary: int = key(256, "Number of different tokens.", ge=1, le=MOST["vocabulary"])
    tied: bool = key(False, "Use the token embedding as the output matrix.")
    activation: str = key("gelu", "Activation function.", choices=ACTIVATIONS)
    dropout: float = key(0.0, "Fraction of elements to drop in training.", ge=0, lt=1)
    positions: str = key("learned", "Position encoding.", choices=POSITIONS)
    rotary_base: float = key(10000.0, "Base of the rotary angles: pair i turns by base^(-2i / head size).", gt=1)
    rotary_scaling: str = key("none", "Scaling of the rotary angles, to extend the context.", choices=SCALINGS)
    rotary_factor: float = key(1.0, "Factor by which the rotary scaling extends the context.", ge=1)
    rotary_context: int = key(0, "Context before its extension, in tokens, for llama3 and yarn.", ge=0, le=MOST_CONTEXT)
    rotary_slow: float = key(
        1.0, "Pairs with fewer rotations over rotary_context are scaled by the factor (llama3, yarn).", gt=0
    )
    rotary_fast: float = key(
        0.0, "Pairs with more rotations over rotary_context are not scaled. 0: 4 for llama3, 32 for yarn.", ge=0
    )
    rotary_magnitude: float = key(0.0, "Factor of the cosines and sines for yarn. 0: 0.1 ln(rotary_factor) + 1.", ge=0)
    rotary_layers: str = key("", 'Blocks with rotary positions, as "1-5,7-11". Empty: all blocks.')
    norm: str = key("layer", "Normalization: layer norm or RMS norm.", choices=NORMS)
    norm_epsilon: float = key(EPSILON, "Number that the norms add to the variance or mean square.", gt=0)
    query_key_norm: str = key(
        "none", "RMS norm of each query head and key head before the rotary positions.", choices=("none", "head")
    )
    kv_heads: int = key(0, "Number of key and value heads. Must divide heads. 0: equal to heads.", ge=0)
    window: int = key(
        0, "Sliding attention window of a gpt in tokens, with the current token. 0: no window.", ge=0, le=MOST_CONTEXT
    )
    feed_forward: int = key(
        0,
        "Inner width of the feed-forward. 0: 4 hidden, or for swiglu 8/3 hidden (a multiple of 32).",
        ge=0,
        le=16 * MOST["hidden"],
    )
    window_layers: str = key("", 'Blocks with the sliding window, as "1-5,7-11". Empty: all blocks.')
    bias: bool = key(True, "Give the linear layers of a block a bias.")
    biased: str = key("all", "Linear layers that have a bias, if model.bias is true.", choices=BIASED)
    mask_token: int = key(-1, "Token that replaces masked tokens. -1: the last token of the vocabulary.", ge=-1)
    factory: str = key(
        "", 'Function that returns the model: "file.py:function" or "package.module:function".', path=".py:"
    )
    experts: int = key(
        0, "Number of experts per block; they replace the feed-forward. 0: a dense model.", ge=0, le=MOST_EXPERTS
    )
    experts_per_token: int = key(2, "Number of experts that process each token.", ge=1)
    shared_experts: int = key(
        0, "Width of an additional feed-forward for all tokens, as a number of experts. 0: none.", ge=0, le=MOST_EXPERTS
    )
    expert_hidden: int = key(
        0, "Inner width of an expert. 0: the inner width of the feed-forward.", ge=0, le=16 * MOST["hidden"]
    )
    router: str = key("softmax", "Function that turns router logits into expert scores.", choices=ROUTERS)
    capacity_factor: float = key(
        0.0, "Most tokens per expert and sample, in even shares. Other tokens are dropped. 0: no limit.", ge=0
    )
    balance_loss: float = key(0.01, "Coefficient of the load-balancing loss. 0: off.", ge=0)
    z_loss: float = key(0.0, "Coefficient of the loss that keeps the router logits small. 0: off.", ge=0)
    balance_rate: float = key(0.0, "Step size of the router biases that balance the load without a loss. 0: off.", ge=0)

    @property
    def inner(self) -> int:
        """Width of the hidden layer of a block's dense feed-forward."""
        if self.feed_forward:
            return self.feed_forward
        return -(-8 * self.hidden // (3 * ROUND_UP)) * ROUND_UP if self.activation == "swiglu" else 4 * self.hidden

    @property
    def expert_inner(self) -> int:
        """Width of the hidden layer of one expert's feed-forward."""
        return self.expert_hidden or self.inner

    @property
    def kv_width(self) -> int:
        """Number of key columns per token, equal to the number of value columns: key heads times head size."""
        return (self.kv_heads or self.heads) * self.head_width

    @property
    def head_width(self) -> int:
        """Number of columns of an attention head."""
        return self.head_size or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Number of query columns per token: heads times head size."""
        return self.heads * self.head_width

    @property
    def separates_query(self) -> bool:
        """True if queries have a matrix of their own, and False if one matrix makes queries, keys and values."""
        return self.kv_width != self.query_width or self.query_key_norm != "none"

    @property
    def rotation(self) -> "Rotation":
        """Rotary angles of a head."""
        is_yarn = self.rotary_scaling == "yarn"
        return Rotation(
            self.head_width,
            self.rotary_base,
            self.rotary_scaling,
            self.rotary_factor,
            self.rotary_context,
            self.rotary_slow,
            self.rotary_fast or (32.0 if is_yarn else 4.0),
            (self.rotary_magnitude or 0.1 * math.log(self.rotary_factor) + 1) if is_yarn else 1.0,
        )

    def has_bias(self, layer: str) -> bool:
        """Return True if the linear layers ``layer`` have a bias: "qkv", "projection" or "feed_forward"."""
        return self.bias and (
            self.biased in ("all", layer) or (self.biased == "attention" and layer in ("qkv", "projection"))
        )

    def has_rotary(self, block: int) -> bool:
        """Return True if block number ``block``, counted from 1, has rotary positions."""
        return self.positions == "rotary" and in_blocks(self.rotary_layers, block)

    def window_of(self, block: int) -> int:
        """Return the sliding window of block number ``block``, counted from 1, in tokens. 0: no window."""
        return self.window if in_blocks(self.window_layers, block) else 0

    @property
    def mask(self) -> int:
        """Id of the token that replaces a masked token in an encoder's input."""
        return self.vocabulary - 1 if self.mask_token < 0 else self.mask_token

    def __post_init__(self) -> None:
        check_section(RULES, "model", self)


def in_blocks(text: str, block: int) -> bool:
    """Return True if the blocks ``text``, such as "1-5,7-11", include number ``block``. Empty text: all blocks."""
    return not text or any(block in part for part in block_ranges(text))


def block_ranges(text: str) -> list[range]:
    """Return a list of the ranges in ``text``, such as "1-5,7-11", or [] if ``text`` is invalid."""
    parts = [re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip(), re.ASCII) for part in text.split(",")]
    ranges = [range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part]
    return ranges if len(ranges) == len(parts) and all(part and part.start for part in ranges) else []


@dataclass(frozen=True)
class Rotation:
    """Rotary angles of a head of ``size`` columns: pair i turns by ``position frequency_i``.

    Formulas: "linear" divides all frequencies by ``factor``. "llama3" (A. Dubey et al., arXiv:2407.21783) and "yarn"
    (B. Peng et al., arXiv:2309.00071) divide the frequencies of pairs with fewer than ``slow`` rotations over
    ``context``, keep the frequencies of pairs with more than ``fast`` rotations, and interpolate between them. "yarn"
    also multiplies cosines and sines by ``magnitude``.
    """

    size: int
    base: float = 10000.0
    scaling: str = "none"
    factor: float = 1.0
    context: int = 0
    slow: float = 1.0
    fast: float = 4.0
    magnitude: float = 1.0


def applies(name: str, kind: str) -> bool:
    """Return True if the key ``name`` of [model] has an effect for models of the given ``kind``."""
    return name == "kind" or kind in _ONLY.get(name, TRANSFORMERS if name in EXPERT_KEYS else BUILT)


def speed_unit(kind: str, tokens_per_sample: float) -> str:
    """Return the unit of a model's training speed: "tokens", or "samples" if samples have one target."""
    return "tokens" if tokens_per_sample > 1 or kind in TRANSFORMERS else "samples"


def loss_unit(kind: str, tokens_per_sample: float) -> str:
    """Return the unit of a model's loss: "nats", or "" if the unit is unknown."""
    # It is unknown for a user's model with one target per sample.
    return "" if kind in FOREIGN and speed_unit(kind, tokens_per_sample) == "samples" else "nats"


_BLOCKS: Final = f"where model.kind={'|'.join(TRANSFORMERS)}"
RULES: Final = (
    *(
        no_effect(f"model.{item.name}", item.default, "model.kind", _ONLY.get(item.name, BUILT))
        for item in fields(ModelConfig)
        if item.name != "kind" and item.name not in EXPERT_KEYS
    ),
    *(
        Rule(
            {
                f"model.{name}": other_than(getattr(ModelConfig, name)),
                "model.experts": Condition(lambda count: count == 0, sign="=", values=(0,)),
            },
            NO_EFFECT,
            "remove it, or set model.experts to 2 or more",
        )
        for name in EXPERT_KEYS
    ),
    rule("model.experts=1", "a router must choose between experts", "set it to 2 or more, or to 0 for a dense model"),
    rule(
        "model.experts_per_token? with model.experts",
        "a token cannot go to more experts than there are",
        "choose at most {1}",
        relation=lambda each, experts: each > experts,
    ),
    rule(
        "model.capacity_factor with model.experts with model.experts_per_token?",
        "an expert would take more than all tokens",
        lambda _, experts, each: f"choose at most {experts / each:g}, or 0 to drop nothing",
        relation=lambda factor, experts, each: factor * each > experts,
    ),
    rule(
        "model.kind=import with model.factory=",
        cure="name a function that returns the model: 'file.py:function' or 'package.module:function'",
    ),
    rule(f"model.activation=swiglu with model.kind!={'|'.join(TRANSFORMERS)}", cure="use 'gelu' or 'relu'"),
    rule(
        f"model.hidden? with model.heads? {_BLOCKS} with model.head_size=0",
        "all heads must have the same width",
        lambda hidden, heads: (
            f"choose a hidden size of {heads * max(1, round(hidden / heads))}, other heads, or a head size"
        ),
        relation=lambda hidden, heads: hidden % heads,
    ),
    rule(
        f"model.kv_heads with model.heads? {_BLOCKS}",
        "the number of key and value heads must divide the number of heads",
        lambda _, heads: f"choose one of {[count for count in range(1, heads + 1) if heads % count == 0]}",
        relation=lambda kv_heads, heads: heads % kv_heads,
    ),
    rule(
        f"model.positions=rotary with model.hidden? with model.heads? with model.head_size? {_BLOCKS}",
        lambda _, hidden, heads, size: (
            "rotary positions need an even head width, and the width is "
            + (f"{size}" if size else f"model.hidden / model.heads = {hidden // heads}")
        ),
        "change model.head_size, model.hidden or model.heads, or use learned positions",
        relation=lambda _, hidden, heads, size: (size or hidden // heads) % 2,
    ),
    rule(
        "model.rotary_scaling=llama3|yarn with model.rotary_context=0",
        cure="set it to the context with which the model was trained before its extension",
    ),
    *(
        rule(
            f"model.{name}? with model.layers? {_BLOCKS}",
            "it must name existing blocks",
            lambda _, layers: f'write ranges of the numbers 1 to {layers}, such as "1-5,7-11"',
            relation=lambda text, layers: (
                bool(text) and not (block_ranges(text) and all(part.stop <= layers + 1 for part in block_ranges(text)))
            ),
        )
        for name in ("rotary_layers", "window_layers")
    ),
    *(
        no_effect(f"model.{name}", getattr(ModelConfig, name), f"model.{other}", needed)
        for names, other, needed in (
            (("rotary_base", "rotary_scaling", "rotary_layers"), "positions", ("rotary",)),
            (("rotary_factor",), "rotary_scaling", SCALINGS[1:]),
            (("rotary_context", "rotary_slow", "rotary_fast"), "rotary_scaling", ("llama3", "yarn")),
            (("rotary_magnitude",), "rotary_scaling", ("yarn",)),
            (("biased",), "bias", (True,)),
        )
        for name in names
    ),
    rule("model.window_layers with model.window=0", NO_EFFECT, "set model.window, or remove it"),
    rule("model.vocabulary<2 where model.kind=encoder", cure="an encoder needs a mask token and at least one other"),
    rule(
        "model.mask_token? with model.vocabulary? where model.kind=encoder",
        "token numbers must be less than the vocabulary",
        "increase model.vocabulary, or choose a smaller token",
        relation=lambda token, vocabulary: token >= vocabulary,
    ),
)
