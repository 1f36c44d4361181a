"""The ``[model]`` section of a recipe. Imports only `reporting`."""

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
    heads: int = key(4, "Number of attention heads. Must divide hidden.", ge=1, le=MOST["hidden"])
    vocabulary: int = key(256, "Number of different tokens.", ge=1, le=MOST["vocabulary"])
    tied: bool = key(False, "Use the token embedding as the output matrix.")
    activation: str = key("gelu", "Activation function.", choices=ACTIVATIONS)
    dropout: float = key(0.0, "Fraction of elements to drop in training.", ge=0, lt=1)
    positions: str = key("learned", "Position encoding.", choices=POSITIONS)
    norm: str = key("layer", "Normalization: layer norm or RMS norm.", choices=NORMS)
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
    bias: bool = key(True, "Give the linear layers of a block a bias.")
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
        return (self.kv_heads or self.heads) * self.hidden // self.heads

    @property
    def mask(self) -> int:
        """Id of the token that replaces a masked token in an encoder's input."""
        return self.vocabulary - 1 if self.mask_token < 0 else self.mask_token

    def __post_init__(self) -> None:
        check_section(RULES, "model", self)


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
