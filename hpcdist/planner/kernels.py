"""Kernels: what a plan assumes about the program that trains, with one class per program.

Add a program as a subclass of `Kernels`, and an entry in `KERNELS`. A layout names its program in the field
``implementation``. Imports nothing.
"""

from typing import ClassVar, Final


class Kernels:
    """Assumptions about a training program: kernels, memory, overlap and features. The base class is for hpcdist."""

    name: ClassVar[str] = "hpcdist"
    is_published: ClassVar[bool] = False  # compared with published trainings, and not run by hpcdist
    library: ClassVar[str] = "mpi"  # communication library, if the layout names none

    # Limits
    splits_evenly: ClassVar[bool] = False  # each degree must divide layers, columns, tokens and batch

    # Attention and recomputation
    tiles_attention: ClassVar[bool] = True  # computes scores in tiles, keeps none, and skips masked tiles
    recomputes_ahead: ClassVar[bool] = True  # pipeline ranks recompute while they wait for the output gradient
    measures_arrays: ClassVar[bool] = True  # memory is counted from hpcdist's arrays, not from published formulas

    # Gradients and parameters
    has_main_gradients: ClassVar[bool] = False  # sums 16-bit gradients in float32, if the layout asks for it
    fuses_gradients: ClassVar[bool] = False  # matrix products may add weight gradients to the accumulated gradients
    loss_bytes: ClassVar[tuple[int, int] | None] = None  # memory traffic of a logit: forward, backward; None: as layers
    sends_stored_gradients: ClassVar[bool] = True  # sharded strategies send gradients in the stored type
    sends_to_owners: ClassVar[bool] = True  # ZeRO sends 16-bit gradients directly to their owners
    gathers_by_tensor: ClassVar[bool] = False  # ZeRO-3 gathers each tensor in a message of its own, not each layer
    keeps_end_layers: ClassVar[bool] = True  # ZeRO-3 keeps the first and the last layer gathered between passes
    grows_buckets: ClassVar[bool] = True  # allreduce buckets start at the recipe's default, and may grow
    overlaps_coded: ClassVar[bool] = False  # compressed gradients, and exchanges with servers, overlap backward

    # Messages
    routes_rows: ClassVar[bool] = True  # sends the numbers of expert rows first, and chooses a route by node
    splits_expert_rows: ClassVar[bool] = False  # with sequence parallelism, a tensor rank routes only its tokens
    rotates_keys: ClassVar[bool] = True  # context ranks pass keys round a ring or exchange heads; else they gather
    splits_borders: ClassVar[bool] = False  # tensor ranks send shares of the activations to the next pipeline rank
    sums_tied_in_pair: ClassVar[bool] = True  # both ranks of a tied tensor send their stored gradient in turn
    blocks_on_messages: ClassVar[bool] = False  # a pipeline rank cannot compute until its messages are complete

    def update_bytes(self, optimizer_bytes: int, gradient_bytes: int, *, is_narrow: bool) -> int:
        """Return the bytes per parameter that gradient norm and optimizer update read and write in memory.

        ``optimizer_bytes``: bytes of the update alone. ``gradient_bytes``: size of a stored gradient element.
        """
        return 2 * gradient_bytes + optimizer_bytes


class Megatron(Kernels):
    """Megatron-LM as in the papers from before FlashAttention."""

    # arXiv:2104.04473, section 4.1: split messages between pipeline ranks. arXiv:2205.05198: formulas of activations,
    # selective recomputation, sequence parallelism.
    name = "megatron"
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

    def update_bytes(self, optimizer_bytes: int, gradient_bytes: int, *, is_narrow: bool) -> int:
        # Copy 16-bit gradients to float32 (6), unscale and check (8), norm (4), clip (8), read (4), step, zero.
        copied = 6 if is_narrow else 0
        return copied + 2 * 4 + 4 + 2 * 4 + 4 + optimizer_bytes + gradient_bytes


KERNELS: Final[dict[str, Kernels]] = {kernels.name: kernels for kernels in (Kernels(), Megatron())}
