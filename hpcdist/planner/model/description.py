"""Description of a model as the planner needs it: units with their matrix products, attention and memory traffic.

Light: dataclasses only. `hpcdist.planner.model.transformer` makes a description from a shape or from a recipe.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hpcdist.models.counts import UnitCounts as Counted


class ProductShape(NamedTuple):
    """A product of matrices (rows, inner) x (inner, columns) for each sample, with a weight.

    ``cut`` says which extent of the weight the tensor axis divides: "columns", "inner" or "" (none). ``experts`` more
    than 1: the weight is there so often, and ``share`` of them sees each row (top k of experts: k / experts).
    """

    rows: int
    inner: int
    columns: int
    cut: str = ""
    experts: int = 1
    share: float = 1.0


class AttentionShape(NamedTuple):
    """Scores of ``heads`` heads of ``size`` over ``context`` tokens; ``pairs`` of a head and sample are looked at.

    With a ``window`` a token sees so many of those before it at most, 0: all. Of packed samples ``within`` are all
    pairs within documents, looked at or not.
    """

    heads: int
    kv_heads: int
    size: int
    context: int
    pairs: float
    window: int = 0
    within: float = 0

    @property
    def every_pair(self) -> float:
        """All pairs, as published formulas count them, causal or not: with a window, so many for each token."""
        return self.within or self.context * min(self.window or self.context, self.context)


@dataclass(frozen=True, kw_only=True)
class ModelUnit:
    """``count`` units one after the other that are alike: an embedding, blocks, a head; layers of an mlp.

    ``parameters`` of one of them; of those the tensor axis divides ``cut_parameters``, the expert axis
    ``expert_parameters`` (which are among the cut ones where the tensor axis cuts them, too). ``moved`` are numbers
    that its elementwise operations read and write, forward, for a sample; backward half as many more. Of them
    ``moved_cut`` are cut over the tensor axis with the products, the rest only with sequence parallelism. ``counted``
    is what `hpcdist.models.counts` tells of it, for the memory of our own kernels.
    """

    name: str
    count: int
    parameters: int
    cut_parameters: int = 0
    expert_parameters: int = 0
    products: tuple[ProductShape, ...] = ()
    attention: AttentionShape | None = None
    moved: float = 0.0
    moved_cut: float = 0.0
    kernels: int = 1  # launched forward
    first: bool = False  # its input is data: no gradient
    counted: "Counted | None" = field(default=None, compare=False, repr=False)

    def __hash__(self) -> int:
        """Tell units apart by a few fields: they are keys of what is known of them, and asked for often."""
        return hash((self.name, self.count, self.parameters, self.moved))


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """A transformer in numbers; see `hpcdist.models.config.ModelConfig`, whose names these are.

    ``gated``: the feed-forward has three matrices (SwiGLU). With ``experts`` the feed-forward of a block is there so
    often, and ``experts_per_token`` of them see a token; beside them all tokens see one as wide as ``shared_experts``.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    context: int
    kv_heads: int = 0
    window: int = 0
    feed_forward: int = 0
    gated: bool = False
    experts: int = 1
    experts_per_token: int = 1
    shared_experts: int = 0
    tied: bool = True
    positions: str = "learned"
    norm: str = "layer"
    bias: bool = True
    causal: bool = True
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """All units in order, the tokens of a sample (1 where a sample is none), and the shape of a transformer.

    ``sample_bytes`` are read for each sample; 0: four for each token, the most that tokens are stored in.
    """

    name: str
    units: tuple[ModelUnit, ...]
    tokens: int
    width: int  # numbers a token that go from block to block
    tied_parameters: int = 0  # of the first unit, that the last one uses as well
    shape: TransformerShape | None = None
    sample_bytes: int = 0

    def __hash__(self) -> int:
        """Tell models apart by a few fields: all units would take longer than what is looked up."""
        return hash((self.name, self.tokens, self.width, self.tied_parameters, len(self.units)))

    @property
    def parameters(self) -> int:
        """Numbers that are trained; a tied tensor counts once."""
        return sum(unit.count * unit.parameters for unit in self.units)

    @property
    def stages(self) -> int:
        """Units that a pipeline may be cut between."""
        return sum(unit.count for unit in self.units)
