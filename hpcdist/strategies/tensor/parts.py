"""What a rank computes by itself, but with its own part of what is dropped. Local."""

from hpcdist.arrays.backend import Array
from hpcdist.models.attention import LocalAttention
from hpcdist.models.dropout import LocalDropout
from hpcdist.models.stage import Saved
from hpcdist.strategies.tensor.axis import TensorAxis
from hpcdist.strategies.tensor.borders import ByRows


class HeadsAttention(LocalAttention):
    """Attention of the own heads, of as many on every rank of the tensor axis."""

    def __init__(self, axis: TensorAxis) -> None:
        self._axis = axis

    def forward(
        self,
        qkv: Array,
        head_size: int,
        saved: Saved,
        name: str = "attention",
        dropout: float = 0.0,
        part: tuple[int, int] | None = None,
        kv: Array | None = None,
        causal: bool = True,
    ) -> Array:
        """Return (batch, context, own width) for the own heads, of queries and of keys and values."""
        heads = qkv.shape[-1] // head_size // (3 if kv is None else 1)
        own = part or (self._axis.rank * heads, self._axis.size * heads)
        return super().forward(qkv, head_size, saved, name, dropout, own, kv, causal)


class RowDropout:
    """Dropout of the own rows (rows, columns) of activations that are cut by tokens."""

    def __init__(self, borders: ByRows) -> None:
        self._borders, self._local = borders, LocalDropout()

    def forward(self, x: Array, rate: float, site: int, saved: Saved) -> Array:
        """Return x, which is overwritten."""
        return self._local.forward(x, rate, site, saved, self._borders.first_token(x), self._borders.context)

    def backward(self, dy: Array, rate: float, site: int, saved: Saved) -> Array:
        """Return dx, a scratch array; dy itself where nothing was dropped."""
        return self._local.backward(dy, rate, site, saved, self._borders.first_token(dy), self._borders.context)
