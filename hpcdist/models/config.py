"""The ``[model]`` section of a recipe. Light: imports nothing but `reporting`."""

from dataclasses import dataclass, fields
from typing import Final

from hpcdist.reporting.rules import at_least, check_section, must, no_effect, one_of, rule

TRANSFORMERS: Final = ("gpt", "encoder")
BUILT: Final = (*TRANSFORMERS, "mlp", "convnet")
FOREIGN: Final = ("import", "given")
KINDS: Final = (*BUILT, *FOREIGN)
ACTIVATIONS: Final = ("gelu", "relu", "swiglu")
POSITIONS: Final = ("learned", "rotary")
NORMS: Final = ("layer", "rms")
ROUND_UP: Final = 32  # the width that "swiglu" gives to a feed-forward is a multiple of it

# Keys that only some kinds have.
_ONLY: Final = {
    "tied": TRANSFORMERS,
    "positions": TRANSFORMERS,
    "norm": (*TRANSFORMERS, "convnet"),
    "kv_heads": TRANSFORMERS,
    "feed_forward": TRANSFORMERS,
    "bias": TRANSFORMERS,
    "mask_token": ("encoder",),
    "factory": ("import",),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Section ``[model]``: the architecture.

    ``gpt``: ``layers`` decoder blocks of width ``hidden`` with ``heads`` heads over ``vocabulary`` tokens, trained to
    say the next token; ``encoder``: the same blocks, where every token sees all others, trained to say tokens that were
    masked. ``tied`` uses the token embedding as the output matrix. ``positions`` are "learned", or "rotary" (Su et al.,
    arXiv:2104.09864); ``norm`` is "layer" or "rms" (Zhang, Sennrich, arXiv:1910.07467). ``kv_heads`` heads of keys and
    values, a divisor of ``heads``, are shared by the queries (Ainslie et al., arXiv:2305.13245); 0: one for each.
    ``feed_forward`` is the inner width of a block's second half; 0: 4 ``hidden``, and with the activation "swiglu"
    (Shazeer, arXiv:2002.05202), which has three matrices there, 8/3 ``hidden`` rounded up to a multiple of 32. Without
    ``bias`` the linears of a block have none. ``mask_token`` is what an encoder reads in the place of a masked token;
    -1: the last of the vocabulary.

    ``mlp``: ``layers`` hidden layers of width ``hidden``. ``convnet``: ``layers`` convolutions, the first to ``hidden``
    channels, every second one from the third on to twice as many at half the resolution. Both have features, or
    pictures, and classes given by the data.

    ``import``: what the function ``factory`` makes, "file.py:function" or "package.module:function", out of modules of
    PyTorch or functions of JAX (see `hpcdist.adapters`); it is given what the data decides, as ``context=`` or
    ``classes=``. ``given``: the model of a script, which brings the batches, too (see `hpcdist.training.script`).

    ``dropout`` is the share of elements that training drops: of embeddings, attention and both branches of a block in
    a transformer, behind each activation in an mlp, of what a convnet's head reads.
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
    feed_forward: int = 0
    bias: bool = True
    mask_token: int = -1
    factory: str = ""

    @property
    def inner(self) -> int:
        """The inner width of a block's feed-forward."""
        if self.feed_forward:
            return self.feed_forward
        return -(-8 * self.hidden // (3 * ROUND_UP)) * ROUND_UP if self.activation == "swiglu" else 4 * self.hidden

    @property
    def kv_width(self) -> int:
        """The columns of the keys, and of the values, of a token."""
        return (self.kv_heads or self.heads) * self.hidden // self.heads

    @property
    def mask(self) -> int:
        """The token that stands for a masked one."""
        return self.vocabulary - 1 if self.mask_token < 0 else self.mask_token

    def __post_init__(self) -> None:
        check_section(RULES, "model", self)


_BLOCKS: Final = f"where model.kind={'|'.join(TRANSFORMERS)}"
RULES: Final = (
    one_of("model.kind", KINDS),
    one_of("model.activation", ACTIVATIONS),
    one_of("model.positions", POSITIONS),
    one_of("model.norm", NORMS),
    *at_least(1, "model.layers", "model.hidden", "model.heads", "model.vocabulary"),
    *at_least(0, "model.kv_heads", "model.feed_forward"),
    *at_least(-1, "model.mask_token"),
    must("model.dropout", lambda share: 0.0 <= share < 1.0, "it must be at least 0 and less than 1"),
    *(
        no_effect(f"model.{item.name}", item.default, "model.kind", _ONLY.get(item.name, BUILT))
        for item in fields(ModelConfig)
        if item.name != "kind"
    ),
    rule(
        "model.kind=import with model.factory=",
        cure="name the function that makes the model: 'file.py:function' or 'package.module:function'",
    ),
    rule(f"model.activation=swiglu with model.kind!={'|'.join(TRANSFORMERS)}", cure="use 'gelu' or 'relu'"),
    rule(
        f"model.hidden? with model.heads? {_BLOCKS}",
        "heads have as many numbers each",
        lambda hidden, heads: f"choose a hidden size of {heads * max(1, round(hidden / heads))}, or other heads",
        relation=lambda hidden, heads: hidden % heads,
    ),
    rule(
        f"model.kv_heads with model.heads? {_BLOCKS}",
        "as many queries share each",
        lambda _, heads: f"choose one of {[count for count in range(1, heads + 1) if heads % count == 0]}",
        relation=lambda kv_heads, heads: heads % kv_heads,
    ),
    rule(
        f"model.positions=rotary with model.hidden? with model.heads? {_BLOCKS}",
        lambda _, hidden, heads: (
            f"pairs are turned, and a head has model.hidden / model.heads = {hidden // heads} numbers"
        ),
        "make that even, or use learned positions",
        relation=lambda _, hidden, heads: hidden // heads % 2,
    ),
    rule("model.vocabulary<2 where model.kind=encoder", cure="an encoder needs a token to say and one for the mask"),
    rule(
        "model.mask_token? with model.vocabulary? where model.kind=encoder",
        "there is no such token",
        "make the vocabulary larger, or name another token",
        relation=lambda token, vocabulary: token >= vocabulary,
    ),
)
