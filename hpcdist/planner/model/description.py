"""Description of a model for the planner: units with matrix products, attention and memory traffic. Dataclasses only.

`hpcdist.planner.model.transformer` creates descriptions from shapes or recipes.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hpcdist.models.counts import UnitCounts as Counted


class ProductShape(NamedTuple):
    """Matrix product of one sample: input of shape (rows, inner) times weight of shape (inner, columns)."""

    rows: int
    inner: int
    columns: int
    cut: str = ""  # weight dimension that tensor parallelism shards: "columns", "inner" or ""
    experts: int = 1  # number of such weights
    share: float = 1.0  # fraction of the experts that process each input row


class AttentionShape(NamedTuple):
    """Sizes of an attention layer, with ``heads`` query heads of ``size`` columns and ``context`` tokens."""

    heads: int
    kv_heads: int
    size: int
    context: int
    pairs: float  # visible query-key pairs per head and sample
    window: int = 0  # sliding window in tokens; 0: unlimited
    within: float = 0  # query-key pairs inside packed documents, without a causal mask; 0: not packed

    @property
    def every_pair(self) -> float:
        """Query-key pairs per head and sample without a causal mask. The usual FLOP formulas count these pairs."""
        return self.within or self.context * min(self.window or self.context, self.context)


@dataclass(frozen=True, kw_only=True)
class ModelUnit:
    """Group of ``count`` identical consecutive layers of a model. All other fields describe one layer."""

    name: str  # embedding, block (transformer), head, layer (mlp) or convolution
    count: int
    parameters: int
    cut_parameters: int = 0  # sharded by the tensor axis, included in ``parameters``
    expert_parameters: int = 0  # sharded by the expert axis, included in ``parameters``
    products: tuple[ProductShape, ...] = ()
    attention: AttentionShape | None = None
    moved: float = 0.0  # elements per sample that elementwise forward operations read and write
    moved_cut: float = 0.0  # the part of ``moved`` that the tensor axis shards without sequence parallelism
    kernels: int = 1  # launched in forward
    first: bool = False  # the input is data and needs no gradient
    # FLOPs and array sizes in hpcdist; None: unknown
    counted: "Counted | None" = field(default=None, compare=False, repr=False)

    def __hash__(self) -> int:
        """Return a hash of a few fields only, which is fast: units are often dictionary keys."""
        return hash((self.name, self.count, self.parameters, self.moved))


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """Sizes and options of a transformer, with the field names of `hpcdist.models.config.ModelConfig`."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    context: int
    kv_heads: int = 0
    head_size: int = 0
    query_key_norm: str = "none"
    window: int = 0
    window_layers: str = ""
    feed_forward: int = 0
    gated: bool = False  # the feed-forward has three matrices (SwiGLU)
    experts: int = 1  # feed-forwards per block
    experts_per_token: int = 1  # experts that process each token
    shared_experts: int = 0  # width of a feed-forward for all tokens / width of an expert
    tied: bool = True
    positions: str = "learned"
    norm: str = "layer"
    bias: bool = True
    biased: str = "all"
    causal: bool = True
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """Model for the planner: a sequence of ``units``, which are groups of identical consecutive layers."""

    name: str
    units: tuple[ModelUnit, ...]
    tokens: int  # per sample; 1 for pictures and table rows
    width: int  # elements per token between blocks
    tied_parameters: int = 0  # parameters of the first unit that the last unit shares
    shape: TransformerShape | None = None  # None for models that are not transformers
    sample_bytes: int = 0  # read from storage per sample; 0: four bytes per token

    def __hash__(self) -> int:
        """Return a hash of a few fields only, because hashing all units is slow."""
        return hash((self.name, self.tokens, self.width, self.tied_parameters, len(self.units)))

    @property
    def parameters(self) -> int:
        """Number of trained parameters. A tied tensor counts only once."""
        return sum(unit.count * unit.parameters for unit in self.units)

    @property
    def stages(self) -> int:
        """Largest possible number of pipeline stages, which is the number of layers with embedding and head."""
        return sum(unit.count for unit in self.units)
