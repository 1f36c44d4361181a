"""The ``[model]`` section of a recipe. Imports only `reporting`."""

from dataclasses import dataclass, fields
from typing import Final

from hpcdist.reporting.rules import (
    NO_EFFECT,
    Condition,
    Rule,
    at_least,
    at_most,
    check_section,
    must,
    no_effect,
    one_of,
    other_than,
    rule,
)

TRANSFORMERS: Final = ("gpt", "encoder")
BUILT: Final = (*TRANSFORMERS, "mlp", "convnet")
FOREIGN: Final = ("import", "given")
KINDS: Final = (*BUILT, *FOREIGN)
ACTIVATIONS: Final = ("gelu", "relu", "swiglu")
POSITIONS: Final = ("learned", "rotary")
NORMS: Final = ("layer", "rms")
ROUTERS: Final = ("softmax", "sigmoid")
# Limits far above any model, so that a mistyped size is rejected before memory is allocated.
MOST: Final = {"layers": 10_000, "hidden": 1 << 20, "vocabulary": 1 << 30}
MOST_CONTEXT: Final = 1 << 27  # tokens per sample
MOST_EXPERTS: Final = 1 << 16
ROUND_UP: Final = 32  # the default feed-forward width of "swiglu" is a multiple of this

# Keys that only some kinds of models use.
_ONLY: Final = {
    "tied": TRANSFORMERS,
    "positions": TRANSFORMERS,
    "norm": (*TRANSFORMERS, "convnet"),
    "kv_heads": TRANSFORMERS,
    "window": ("gpt",),
    "feed_forward": TRANSFORMERS,
    "bias": TRANSFORMERS,
    "mask_token": ("encoder",),
    "factory": ("import",),
    "experts": TRANSFORMERS,
}
# Keys that only a mixture of experts uses; models without experts must have these defaults.
EXPERT_KEYS: Final = {
    "experts_per_token": 2,
    "shared_experts": 0,
    "expert_hidden": 0,
    "router": "softmax",
    "capacity_factor": 0.0,
    "balance_loss": 0.01,
    "z_loss": 0.0,
    "balance_rate": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Section ``[model]``: the architecture.

    Kinds:
        gpt: ``layers`` decoder blocks of width ``hidden`` with ``heads`` heads, trained to predict the next token.
        encoder: The same blocks without a causal mask, trained to predict masked tokens.
        mlp: ``layers`` hidden layers of width ``hidden``.
        convnet: ``layers`` convolutions, the first with ``hidden`` channels.
        import: A model in PyTorch or JAX (`hpcdist.adapters`), made by the function ``factory``: "file.py:function" or
            "package.module:function".
        given: The model of a script (`hpcdist.training.script`).

    Transformers:
        tied: Use the token embedding also as the output matrix.
        positions: Position encoding: "learned", or "rotary" (Su et al., arXiv:2104.09864).
        norm: "layer", or "rms" (Zhang, Sennrich, arXiv:1910.07467).
        kv_heads: Number of key and value heads (Ainslie et al., arXiv:2305.13245). 0: as many as ``heads``.
        window: Sliding window of a gpt in tokens (Jiang et al., arXiv:2310.06825). 0: no window.
        feed_forward: Inner width of the feed-forward. 0: 4 ``hidden``, or for "swiglu" (Shazeer, arXiv:2002.05202)
            8/3 ``hidden``, rounded up to a multiple of 32.

    Mixture of experts (formulas in `hpcdist.models.experts.router`):
        experts: Number of experts per block, each of inner width ``expert_hidden``. 0: dense feed-forward.
        shared_experts: Inner width, as a multiple of ``expert_hidden``, of an additional feed-forward for all tokens.
    """

    kind: str = "gpt"
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    vocabulary: int = 256
    tied: bool = False
    activation: str = "gelu"
    dropout: float = 0.0
    positions: str = "learned"
    norm: str = "layer"
    kv_heads: int = 0
    window: int = 0
    feed_forward: int = 0
    bias: bool = True
    mask_token: int = -1
    factory: str = ""
    experts: int = 0
    experts_per_token: int = 2
    shared_experts: int = 0
    expert_hidden: int = 0
    router: str = "softmax"
    capacity_factor: float = 0.0
    balance_loss: float = 0.01
    z_loss: float = 0.0
    balance_rate: float = 0.0

    @property
    def inner(self) -> int:
        """Inner width (columns between its two matrices) of a block's dense feed-forward."""
        if self.feed_forward:
            return self.feed_forward
        return -(-8 * self.hidden // (3 * ROUND_UP)) * ROUND_UP if self.activation == "swiglu" else 4 * self.hidden

    @property
    def expert_inner(self) -> int:
        """Inner width (columns between its two matrices) of one expert's feed-forward."""
        return self.expert_hidden or self.inner

    @property
    def kv_width(self) -> int:
        """Number of columns of a token's keys, and also of its values: number of key heads times head size."""
        return (self.kv_heads or self.heads) * self.hidden // self.heads

    @property
    def mask(self) -> int:
        """Id of the token that replaces masked tokens in an encoder."""
        return self.vocabulary - 1 if self.mask_token < 0 else self.mask_token

    def __post_init__(self) -> None:
        check_section(RULES, "model", self)


def applies(name: str, kind: str) -> bool:
    """Return True if the key ``name`` of [model] has an effect with ``model.kind`` = ``kind``."""
    return name == "kind" or kind in _ONLY.get(name, TRANSFORMERS if name in EXPERT_KEYS else BUILT)


def speed_unit(kind: str, tokens_per_sample: float) -> str:
    """Return the unit of training speed: "tokens", or "samples" if a sample has only one target."""
    return "tokens" if tokens_per_sample > 1 or kind in TRANSFORMERS else "samples"


def loss_unit(kind: str, tokens_per_sample: float) -> str:
    """Return the unit of the loss: "nats", or "" if unknown: for a user's model with one target per sample."""
    return "" if kind in FOREIGN and speed_unit(kind, tokens_per_sample) == "samples" else "nats"


_BLOCKS: Final = f"where model.kind={'|'.join(TRANSFORMERS)}"
RULES: Final = (
    one_of("model.kind", KINDS),
    one_of("model.activation", ACTIVATIONS),
    one_of("model.positions", POSITIONS),
    one_of("model.norm", NORMS),
    *at_least(1, "model.layers", "model.hidden", "model.heads", "model.vocabulary"),
    *(each for name, most in MOST.items() for each in at_most(most, f"model.{name}")),
    *at_most(MOST["hidden"], "model.heads"),
    *at_most(16 * MOST["hidden"], "model.feed_forward", "model.expert_hidden"),
    *at_most(MOST_EXPERTS, "model.experts", "model.shared_experts"),
    *at_most(MOST_CONTEXT, "model.window"),
    one_of("model.router", ROUTERS),
    *at_least(0, *(f"model.{name}" for name in ("kv_heads", "window", "feed_forward", "experts"))),
    *at_least(0, "model.shared_experts", "model.expert_hidden"),
    *(
        must(f"model.{name}", lambda value: 0.0 <= value < float("inf"), "it must be finite and at least 0")
        for name in ("capacity_factor", "balance_loss", "z_loss", "balance_rate")
    ),
    *at_least(1, "model.experts_per_token"),
    *at_least(-1, "model.mask_token"),
    must("model.dropout", lambda share: 0.0 <= share < 1.0, "it must be at least 0 and less than 1"),
    *(
        no_effect(f"model.{item.name}", item.default, "model.kind", _ONLY.get(item.name, BUILT))
        for item in fields(ModelConfig)
        if item.name != "kind" and item.name not in EXPERT_KEYS
    ),
    *(
        Rule(
            {
                f"model.{name}": other_than(default),
                "model.experts": Condition(lambda count: count == 0, sign="=", values=(0,)),
            },
            NO_EFFECT,
            "remove it, or set model.experts to 2 or more",
        )
        for name, default in EXPERT_KEYS.items()
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
        f"model.hidden? with model.heads? {_BLOCKS}",
        "all heads must have the same width",
        lambda hidden, heads: f"choose a hidden size of {heads * max(1, round(hidden / heads))}, or other heads",
        relation=lambda hidden, heads: hidden % heads,
    ),
    rule(
        f"model.kv_heads with model.heads? {_BLOCKS}",
        "the number of key and value heads must divide the number of heads",
        lambda _, heads: f"choose one of {[count for count in range(1, heads + 1) if heads % count == 0]}",
        relation=lambda kv_heads, heads: heads % kv_heads,
    ),
    rule(
        f"model.positions=rotary with model.hidden? with model.heads? {_BLOCKS}",
        lambda _, hidden, heads: (
            f"rotary positions need an even head width, and model.hidden / model.heads = {hidden // heads}"
        ),
        "change model.hidden or model.heads, or use learned positions",
        relation=lambda _, hidden, heads: hidden // heads % 2,
    ),
    rule("model.vocabulary<2 where model.kind=encoder", cure="an encoder needs a mask token and at least one other"),
    rule(
        "model.mask_token? with model.vocabulary? where model.kind=encoder",
        "token numbers must be less than the vocabulary",
        "increase model.vocabulary, or choose a smaller token",
        relation=lambda token, vocabulary: token >= vocabulary,
    ),
)
