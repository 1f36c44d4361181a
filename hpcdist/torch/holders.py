"""Holders that keep a `Work` of Python alive while C++ code of PyTorch refers to it.

If the Python object of a Work is freed, the C++ object stays, but it has lost every method that Python overrides: its
``wait`` then never returns. PyTorch puts each Work that an overridden collective returns to C++ into a holder. A Work
that a Python program passes to C++ has none: `install` adds one wherever the bindings accept a Work. The holder ends
with its last C++ reference.
"""

from typing import Any, Final

import torch
import torch.distributed as dist

from hpcdist.torch.work import Work

_bindings: Final = torch._C._distributed_c10d
_Reducer: Final[Any] = _bindings.Reducer
# Every function of the bindings that stores a Work. `Work.boxed`, which is a method, is overridden below.
STORES: Final = ((_Reducer, "_set_forward_pass_work_handle"), (_bindings, "_register_work"))
_ProcessGroup: Any = dist.ProcessGroup  # untyped in PyTorch


class _Holder(_ProcessGroup):
    """A process group whose barrier returns ``work``: the C++ method of this name puts it into a holder."""

    def __init__(self, work: Work) -> None:
        super().__init__(0, 1)
        self._work = work

    def barrier(self, *_: Any) -> Work:
        """Return the Work to hold."""
        return self._work


def hold(work: Any) -> Any:
    """Return a C++ Work that forwards ``wait`` and ``get_future`` to ``work`` and keeps it alive (local)."""
    return _ProcessGroup.barrier(_Holder(work), dist.BarrierOptions()) if isinstance(work, Work) else work


def _boxed(work: Work) -> Any:
    return hold(work).boxed()


def install() -> None:
    """Let the bindings hold each `Work` that they store (local)."""
    for owner, name in STORES:
        if hasattr(owner, name):  # a later PyTorch may have removed it
            setattr(owner, name, _with_holders(getattr(owner, name)))
    Work.boxed = _boxed


def _with_holders(store: Any) -> Any:
    def stored(*arguments: Any) -> Any:
        return store(*map(hold, arguments))

    return stored
