"""The ``[model]`` section of a recipe. Light: imports nothing but the errors."""

from dataclasses import dataclass, fields
from typing import Any, Final

from hpcdist.errors import ConfigurationError

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
    "kind": KINDS,
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
        for name, choices in (("kind", KINDS), ("activation", ACTIVATIONS), ("positions", POSITIONS), ("norm", NORMS)):
            value = getattr(self, name)
            if value not in choices:
                raise ConfigurationError(f"model.{name} is {value!r}; choose one of {', '.join(choices)}")
        for name, least in (
            ("layers", 1),
            ("hidden", 1),
            ("heads", 1),
            ("vocabulary", 1),
            ("kv_heads", 0),
            ("feed_forward", 0),
            ("mask_token", -1),
        ):
            if getattr(self, name) < least:
                raise ConfigurationError(f"model.{name} is {getattr(self, name)}; it must be at least {least}")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigurationError(f"model.dropout is {self.dropout}; it must be at least 0 and less than 1")
        self._check_kind()
        if self.kind in TRANSFORMERS:
            self._check_heads()
        if self.kind == "encoder":
            self._check_mask()

    def _check_kind(self) -> None:
        """Refuse keys that this kind of model would ignore."""
        for item in fields(self):
            value, kinds = getattr(self, item.name), _ONLY.get(item.name, BUILT)
            if value != item.default and self.kind not in kinds:
                raise ConfigurationError(
                    f"model.{item.name} = {_written(value)} has no effect with model.kind = {self.kind!r}; remove it, "
                    f"or choose {' or '.join(kinds)}"
                )
        if self.kind == "import" and not self.factory:
            raise ConfigurationError(
                "model.kind = 'import' needs model.factory, the function that makes the model: 'file.py:function' or "
                "'package.module:function'"
            )
        if self.activation == "swiglu" and self.kind not in TRANSFORMERS:
            raise ConfigurationError(
                f"model.activation = 'swiglu' is for {' and '.join(TRANSFORMERS)}; a model of kind {self.kind!r} uses "
                "'gelu' or 'relu'"
            )

    def _check_heads(self) -> None:
        if self.hidden % self.heads:
            raise ConfigurationError(
                f"model.hidden = {self.hidden} is not a multiple of model.heads = {self.heads}; "
                f"choose a hidden size of {self.heads * max(1, round(self.hidden / self.heads))}, or other heads"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            divisors = [count for count in range(1, self.heads + 1) if self.heads % count == 0]
            raise ConfigurationError(
                f"model.kv_heads = {self.kv_heads} does not divide model.heads = {self.heads}; choose one of {divisors}"
            )
        size = self.hidden // self.heads
        if self.positions == "rotary" and size % 2:
            raise ConfigurationError(
                f"model.positions = 'rotary' turns pairs, and a head has model.hidden / model.heads = {size} numbers; "
                "make that even, or use learned positions"
            )

    def _check_mask(self) -> None:
        if self.vocabulary < 2:
            raise ConfigurationError("model.vocabulary is 1; an encoder needs a token to say and one for the mask")
        if self.mask_token >= self.vocabulary:
            raise ConfigurationError(
                f"model.mask_token is {self.mask_token}, outside of the model.vocabulary = {self.vocabulary} tokens; "
                "make the vocabulary larger, or name another token"
            )


def _written(value: Any) -> str:
    """Return ``value`` as messages quote it: true and false as a recipe has them."""
    return str(value).lower() if isinstance(value, bool) else repr(value)
