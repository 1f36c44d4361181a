"""The ``[model]`` section of a recipe."""

from dataclasses import dataclass
from typing import Final

from hpcdist.errors import ConfigurationError

KINDS: Final = ("gpt", "mlp")
ACTIVATIONS: Final = ("gelu", "relu")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is trained.

    ``gpt``: ``layers`` decoder blocks of width ``hidden`` with ``heads`` heads over ``vocabulary`` tokens; ``tied``
    uses the token embedding as the output matrix. ``mlp``: ``layers`` hidden layers of width ``hidden``, with
    features and classes given by the data. ``dropout`` is the share of elements that training drops: of embeddings,
    attention and both branches of a block in a gpt, behind each activation in an mlp.
    """

    kind: str = "gpt"
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    vocabulary: int = 256
    tied: bool = False
    activation: str = "gelu"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigurationError(f"model.kind is {self.kind!r}; choose one of {', '.join(KINDS)}")
        if self.activation not in ACTIVATIONS:
            raise ConfigurationError(f"model.activation is {self.activation!r}; choose one of {', '.join(ACTIVATIONS)}")
        for name in ("layers", "hidden", "heads", "vocabulary"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigurationError(f"model.{name} is {value}; it must be at least 1")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigurationError(f"model.dropout is {self.dropout}; it must be at least 0 and less than 1")
        if self.kind == "gpt":
            self._check_gpt()
        elif self.tied:
            raise ConfigurationError("model.tied = true needs model.kind = 'gpt': an mlp has no token embedding to tie")

    def _check_gpt(self) -> None:
        if self.hidden % self.heads:
            raise ConfigurationError(
                f"model.hidden = {self.hidden} is not a multiple of model.heads = {self.heads}; "
                f"choose a hidden size of {self.heads * max(1, round(self.hidden / self.heads))}, or other heads"
            )
        if self.activation != "gelu":
            raise ConfigurationError(f"model.activation = {self.activation!r} is for the mlp; a gpt uses 'gelu'")
