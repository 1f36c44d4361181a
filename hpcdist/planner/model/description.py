"""Description of a model for the planner: units with matrix products, attention and memory traffic. Dataclasses only.

`hpcdist.planner.model.transformer` creates descriptions from shapes or recipes.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hpcdist.models.counts import UnitCounts as Counted


class ProductShape(NamedTuple):
    """Matrix product per sample: an input of shape (rows, inner) times a weight of shape (inner, columns).

    ``cut``: dimension of the weight that tensor parallelism shards: "columns", "inner" or "". ``experts``: number of
    experts with such a weight, or 1. ``share``: fraction of the experts that process each input row.
    """

    rows: int
    inner: int
    columns: int
    cut: str = ""
    experts: int = 1
    share: float = 1.0


class AttentionShape(NamedTuple):
    """Attention of ``heads`` heads of size ``size`` over ``context`` tokens.

    ``pairs``: visible query-key pairs per head and sample. ``window``: sliding window in tokens, 0: unlimited.
    ``within``: query-key pairs inside packed documents, without a causal mask; 0 for other samples.
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
        """Number of query-key pairs if the causal mask is ignored, as in the usual FLOP formulas for transformers."""
        return self.within or self.context * min(self.window or self.context, self.context)


@dataclass(frozen=True, kw_only=True)
class ModelUnit:
    """Group of ``count`` identical consecutive layers: an embedding, transformer blocks, a head, or layers of an mlp.

    All values but ``count`` are for one layer.
    ``cut_parameters``: number of the ``parameters`` that the tensor axis shards.
    ``expert_parameters``: number of the ``parameters`` that the expert axis shards.
    ``moved``: elements per sample that elementwise operations of the forward pass read and write.
    ``moved_cut``: number of these elements that the tensor axis shards even without sequence parallelism.
    ``counted``: FLOPs and array sizes in the implementation of hpcdist, or None if unknown.
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
    kernels: int = 1  # launched in forward
    first: bool = False  # the input is data and needs no gradient
    counted: "Counted | None" = field(default=None, compare=False, repr=False)

    def __hash__(self) -> int:
        """Hash only a few fields of the unit, because units are dictionary keys and are looked up often."""
        return hash((self.name, self.count, self.parameters, self.moved))


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """Sizes of a transformer, with the names of `hpcdist.models.config.ModelConfig`.

    ``gated``: the feed-forward has three matrices (SwiGLU). ``experts``: feed-forwards per block.
    ``experts_per_token``: experts that process each token. ``shared_experts``: width of a feed-forward for all tokens,
    as a multiple of an expert's width.
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
    """Model as a list of units (groups of equal layers). ``tokens``: tokens per sample, 1 for pictures and table rows.

    ``shape``: sizes of a transformer, or None for other models. ``sample_bytes``: bytes read from storage per sample,
    or 0 for four bytes per token.
    """

    name: str
    units: tuple[ModelUnit, ...]
    tokens: int
    width: int  # elements per token between blocks
    tied_parameters: int = 0  # parameters of the first unit that the last unit shares
    shape: TransformerShape | None = None
    sample_bytes: int = 0

    def __hash__(self) -> int:
        """Hash only a few fields of the model: a hash over all units would take longer than a cache lookup."""
        return hash((self.name, self.tokens, self.width, self.tied_parameters, len(self.units)))

    @property
    def parameters(self) -> int:
        """Number of trained parameters. Tied tensors count once."""
        return sum(unit.count * unit.parameters for unit in self.units)

    @property
    def stages(self) -> int:
        """Maximum number of pipeline stages, which is the number of units."""
        return sum(unit.count for unit in self.units)
