"""The ``[lora]`` section of a recipe: low-rank adapters. Imports only the errors and `reporting`."""

from dataclasses import dataclass
from typing import Final

from hpcdist.errors import ConfigurationError
from hpcdist.reporting.rules import NO_EFFECT, Condition, Rule, other_than
from hpcdist.reporting.schema import check_section, key

# Linear layers that may have low-rank adapters: for each number of matrices that a layer stacks, their names.
ADAPTED_LAYERS: Final = {
    "qkv": (("query", "key", "value"),),
    "query": (("query",),),
    "kv": (("key", "value"),),
    "projection": (("projection",),),
    "up": (("up",), ("gate", "up")),
    "down": (("down",),),
}
# Names of these matrices in recipes, and in Hugging Face's models.
TARGETS: Final = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "projection": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Section ``[lora]``: low-rank adapters (Hu et al., arXiv:2106.09685). All other tensors are frozen.

    An adapter adds ``alpha / rank b a x`` to the output of a matrix for the input x. ``a`` (rank, inputs) starts with
    random numbers, and ``b`` (outputs, rank) with zeros.
    """

    rank: int = key(0, "Rank of the low-rank adapters of linear layers. 0: no adapters.", ge=0, le=1 << 16)
    alpha: float = key(16.0, "Scale of the adapters: their output is multiplied by alpha / rank.", gt=0)
    dropout: float = key(0.0, "Fraction of the adapters' inputs to drop in training.", ge=0, lt=1)
    targets: tuple[str, ...] = key(
        (), 'Matrices with an adapter, as ["query", "value"] or ["q_proj", "v_proj"]. Empty: all of a block.'
    )
    init_from: str = key("", "Directory with adapters in PEFT's files, to start with. Empty: new ones.", path=True)

    def __post_init__(self) -> None:
        check_section(RULES, "lora", self)
        names = {*TARGETS, *TARGETS.values()}
        if unknown := [target for target in self.targets if target not in names]:
            raise ConfigurationError(
                f"lora.targets has {unknown[0]!r}, which matches no linear layer; choose from {', '.join(TARGETS)}"
            )

    @property
    def adapted(self) -> tuple[str, ...]:
        """Names of the matrices with an adapter, as in `TARGETS`. Empty: all."""
        ours = {theirs: name for name, theirs in TARGETS.items()}
        return tuple(ours.get(target, target) for target in self.targets)


RULES: Final = tuple(
    Rule(
        {
            f"lora.{name}": other_than(getattr(LoraConfig, name)),
            "lora.rank": Condition(lambda rank: rank == 0, sign="=", values=(0,)),
        },
        NO_EFFECT,
        "remove it, or set lora.rank, for example to 8",
    )
    for name in ("alpha", "dropout", "targets", "init_from")
)
