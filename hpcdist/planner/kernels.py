"""Kernels: what a plan assumes about the program that trains, with one class per program.

Add a program as a subclass of `Kernels`, and an entry in `KERNELS`. A layout names its program in the field
``implementation``. Imports nothing.
"""

from collections.abc import Mapping
from typing import ClassVar, Final, NamedTuple


class Calibration(NamedTuple):
    """Fit of a program to published steps on one device, and the residuals of the fit.

    Published / planned step time of the rows is between ``fastest`` and ``slowest``. Fewer than `ENOUGH` rows are an
    estimate without a range. The benchmark `python -m benchmarks planner` prints the residuals.
    """

    matmul: float = 1.0  # factor on the efficiency curve of matrix products
    attention: float = 0.0  # fraction of the peak FLOP rate that attention reaches; 0: as the cluster file says
    overlap: float = 1.0  # 1 - slowdown of computation by messages of ZeRO that it overlaps, on the fastest links
    rows: int = 0  # number of published steps
    fastest: float = 1.0
    slowest: float = 1.0


NO_FIT: Final = Calibration()
ENOUGH: Final = 5  # rows from which on a fit has a range
A100: Final = "A100-SXM4-80GB"
H100: Final = "H100-SXM5-80GB"


class Kernels:
    """Assumptions about a training program: kernels, memory, overlap and features. The base class is for hpcdist."""

    name: ClassVar[str] = "hpcdist"
    is_published: ClassVar[bool] = False  # compared with published trainings, and not run by hpcdist
    library: ClassVar[str] = "mpi"  # communication library, if the layout names none

    # Limits
    schedules: ClassVar[tuple[str, ...]] = ()  # pipeline schedules that a search tries; (): all
    splits_evenly: ClassVar[bool] = False  # each degree must divide layers, columns, tokens and batch

    # Matrix products, attention and recomputation
    products: ClassVar[str] = ""  # data type of the factors of products in transformer blocks; "": as activations
    tiles_attention: ClassVar[bool] = True  # computes scores in tiles, keeps none, and skips masked tiles
    stops_early: ClassVar[bool] = False  # full recomputation of a block omits the block's last product
    recomputes_ahead: ClassVar[bool] = True  # pipeline ranks recompute while they wait for the output gradient
    measures_arrays: ClassVar[bool] = True  # memory is counted from hpcdist's arrays, not from published formulas

    # Gradients and parameters
    has_main_gradients: ClassVar[bool] = False  # sums 16-bit gradients in float32, if the layout asks for it
    fuses_gradients: ClassVar[bool] = False  # matrix products may add weight gradients to the accumulated gradients
    loss_bytes: ClassVar[tuple[int, int] | None] = None  # memory traffic of a logit: forward, backward; None: as layers
    # Memory traffic of elementwise operations / traffic of fused operations: other blocks, and blocks with SwiGLU
    traffic: ClassVar[tuple[float, float]] = (1.0, 1.0)
    again_share: ClassVar[float] = 0.0  # selective recomputation repeats this share of the products, all elementwise
    sends_stored_gradients: ClassVar[bool] = True  # sharded strategies send gradients in the stored type
    sends_to_owners: ClassVar[bool] = True  # ZeRO sends 16-bit gradients directly to their owners
    gathers_by_tensor: ClassVar[bool] = False  # ZeRO-3 gathers each tensor in a message of its own, not each layer
    keeps_end_layers: ClassVar[bool] = True  # ZeRO-3 keeps the first and the last layer gathered between passes
    hides_gathers: ClassVar[bool] = False  # ZeRO-1 and ZeRO-2 gather parameters during the next forward
    grows_buckets: ClassVar[bool] = True  # allreduce buckets start at the recipe's default, and may grow
    overlaps_coded: ClassVar[bool] = False  # compressed gradients, and exchanges with servers, overlap backward

    # Messages
    hidden_tensor: ClassVar[float] = 0.0  # share of the messages between tensor ranks that products overlap
    jitter: ClassVar[float] = 0.0  # standard deviation of a node's step time, in parts of the step
    counts_ends: ClassVar[bool] = False  # the embedding and the head may count as one pipeline layer each
    routes_rows: ClassVar[bool] = True  # sends the numbers of expert rows first, and chooses a route by node
    splits_expert_rows: ClassVar[bool] = False  # with sequence parallelism, a tensor rank routes only its tokens
    rotates_keys: ClassVar[bool] = True  # context ranks pass keys round a ring or exchange heads; else they gather
    splits_borders: ClassVar[bool] = False  # tensor ranks send shares of the activations to the next pipeline rank
    sums_tied_in_pair: ClassVar[bool] = True  # both ranks of a tied tensor send their stored gradient in turn
    blocks_on_messages: ClassVar[bool] = False  # a pipeline rank cannot compute until its messages are complete

    fits: ClassVar[Mapping[str, Calibration]] = {}  # by name of the device; "": all other devices

    def fit(self, device: str) -> Calibration:
        """Return the fit to published steps on devices named ``device``."""
        return self.fits.get(device) or self.fits.get("", NO_FIT)

    def update_bytes(self, optimizer_bytes: int, gradient_bytes: int, *, is_narrow: bool) -> int:
        """Return the bytes per parameter that gradient norm and optimizer update read and write in memory.

        ``optimizer_bytes``: bytes of the update alone. ``gradient_bytes``: size of a stored gradient element.
        """
        return 2 * gradient_bytes + optimizer_bytes


class Megatron2022(Kernels):
    """Megatron-LM as in the papers from before FlashAttention."""

    # arXiv:2104.04473, section 4.1: split messages between pipeline ranks. arXiv:2205.05198: formulas of activations,
    # selective recomputation, sequence parallelism.
    name = "megatron-2022"
    is_published = True
    library = "nccl"
    splits_evenly = True
    tiles_attention = False
    recomputes_ahead = False
    measures_arrays = False
    has_main_gradients = True
    fuses_gradients = True
    # Bytes per float32 logit that vocab_parallel_cross_entropy moves. Forward: cast (6), maximum (4), difference (8),
    # exponential (8), sum (4), quotient (8). Backward: factor (8), cast (6).
    loss_bytes = (38, 14)
    sends_stored_gradients = False
    sends_to_owners = False
    gathers_by_tensor = True
    keeps_end_layers = False
    grows_buckets = False
    overlaps_coded = True
    routes_rows = False
    splits_expert_rows = True
    rotates_keys = False
    splits_borders = True
    sums_tied_in_pair = False
    blocks_on_messages = True
    # Residuals of the test rows of benchmarks/planner/published, all on these devices.
    fits: ClassVar[Mapping[str, Calibration]] = {A100: Calibration(rows=38, fastest=0.98, slowest=1.09)}

    def update_bytes(self, optimizer_bytes: int, gradient_bytes: int, *, is_narrow: bool) -> int:
        # Copy 16-bit gradients to float32 (6), unscale and check (8), norm (4), clip (8), read (4), step, zero.
        copied = 6 if is_narrow else 0
        return copied + 2 * 4 + 4 + 2 * 4 + 4 + optimizer_bytes + gradient_bytes


class MegatronCore(Megatron2022):
    """Megatron-Core with Transformer Engine: fused attention, loss and elementwise kernels, overlapped exchanges."""

    # github.com/NVIDIA/Megatron-LM: --overlap-grad-reduce, --overlap-param-gather, --tp-comm-overlap,
    # --cross-entropy-loss-fusion, --account-for-embedding-in-pipeline-split.
    name = "megatron-core"
    schedules = ("1f1b", "interleaved")
    tiles_attention = True
    # The fused loss reads float32 logits three times and writes them once. Backward reads and writes them once.
    loss_bytes = (16, 8)
    traffic = (1.5, 1.5)
    hides_gathers = True
    hidden_tensor = 0.7
    jitter = 0.005
    counts_ends = True
    gathers_by_tensor = False
    blocks_on_messages = False
    # H100: Llama 3 70B on 64 to 2,048 devices; the range is wider, because all rows are one model. Other devices: as
    # H100, an estimate.
    fits: ClassVar[Mapping[str, Calibration]] = {
        H100: Calibration(matmul=0.83, attention=0.55, rows=6, fastest=0.92, slowest=1.12),
        "": Calibration(matmul=0.83),
    }

    def update_bytes(self, optimizer_bytes: int, gradient_bytes: int, *, is_narrow: bool) -> int:
        # The fused optimizer reads float32 gradients, which the norm reads once more, and zeroes them.
        return 2 * gradient_bytes + optimizer_bytes + gradient_bytes


class MegatronCoreFp8(MegatronCore):
    """Megatron-Core with FP8 products in transformer blocks. Attention, messages and the head stay in bfloat16."""

    name = "megatron-core-fp8"
    products = "float8"
    # H100: Llama 3 of 8B to 405B on 8 to 1,024 devices.
    fits: ClassVar[Mapping[str, Calibration]] = {
        H100: Calibration(matmul=0.7, attention=0.55, rows=5, fastest=0.94, slowest=1.1),
        "": Calibration(matmul=0.7),
    }


class Fsdp2(Kernels):
    """PyTorch FullyShardedDataParallel of 2024 (``fully_shard``) without a compiler, as in torchtitan."""

    # github.com/pytorch/torchtitan: parameters are gathered in bfloat16, and gradients are reduced in float32.
    # Selective recomputation keeps attention and every second product. torch.utils.checkpoint ends a recomputation at
    # the last tensor that backward needs (``set_checkpoint_early_stop``).
    name = "fsdp2"
    is_published = True
    library = "nccl"
    schedules = MegatronCore.schedules
    splits_evenly = True
    recomputes_ahead = False
    measures_arrays = False
    loss_bytes = Megatron2022.loss_bytes
    traffic = (1.5, 1.95)  # RMSNorm, SwiGLU and rotary positions are several kernels each
    stops_early = True
    again_share = 0.5
    sends_stored_gradients = False
    sends_to_owners = False
    grows_buckets = False
    overlaps_coded = True
    jitter = 0.005
    routes_rows = False
    rotates_keys = False
    sums_tied_in_pair = False
    # A100: Llama 2 and 3 of 8B to 70B on 64 devices. Other devices: products as with FSDP1, attention as
    # FlashAttention 2 on H100 (arXiv:2307.08691), an estimate.
    fits: ClassVar[Mapping[str, Calibration]] = {
        A100: Calibration(matmul=0.865, attention=0.5, overlap=0.5, rows=6, fastest=0.94, slowest=1.06),
        "": Calibration(matmul=0.75, attention=0.37, overlap=0.5),
    }


class Fsdp2Compiled(Fsdp2):
    """PyTorch ``fully_shard`` with ``torch.compile`` on each block, which fuses elementwise operations."""

    name = "fsdp2-compiled"
    traffic = (1.0, 1.0)
    fits: ClassVar[Mapping[str, Calibration]] = {
        A100: Fsdp2.fits[A100]._replace(rows=0),
        "": Fsdp2.fits[""],
    }


class Fsdp1(Fsdp2):
    """PyTorch FullyShardedDataParallel of 2023 with Triton's attention, as in MosaicML's llm-foundry."""

    # github.com/mosaicml/llm-foundry, mixed_precision: PURE: gradients are reduced in bfloat16.
    name = "fsdp1"
    again_share = 0.0
    sends_stored_gradients = True
    # MPT of 1B to 70B on 8 to 64 devices, Llama 2 on 96 and 128. Triton's attention of 2023 was slow on H100.
    fits: ClassVar[Mapping[str, Calibration]] = {
        A100: Calibration(matmul=0.85, attention=0.5, overlap=0.5, rows=17, fastest=0.95, slowest=1.1),
        H100: Calibration(matmul=0.75, attention=0.2, overlap=0.5, rows=18, fastest=0.94, slowest=1.22),
        "": Calibration(matmul=0.75, attention=0.2, overlap=0.5),
    }


KERNELS: Final[dict[str, Kernels]] = {
    kernels.name: kernels
    for kernels in (Kernels(), MegatronCore(), MegatronCoreFp8(), Fsdp2(), Fsdp2Compiled(), Fsdp1(), Megatron2022())
}


def modern_program(*, is_data_parallel: bool, has_fused_attention: bool) -> str:
    """Return the name of the program that people use for a layout: FSDP2 for data parallelism, else Megatron-Core.

    ``has_fused_attention``: False for devices older than the A100, which the papers before FlashAttention used.
    """
    if not has_fused_attention:
        return Megatron2022.name
    return Fsdp2.name if is_data_parallel else MegatronCore.name


RENAMED: Final = {"megatron": Megatron2022.name}  # earlier names of programs
