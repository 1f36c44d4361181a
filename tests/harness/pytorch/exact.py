"""PyTorch, in which float32 means float64."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def in_float64() -> Iterator[None]:
    """Let transformers compute in float64 where it would convert to float32: norms, angles, softmax."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("safetensors.torch")  # its table of types must have the true types
    before = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        yield
    torch.set_default_dtype(before)
