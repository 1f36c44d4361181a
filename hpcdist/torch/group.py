"""PyTorch process group over a communicator of hpcdist: all operations of `torch.distributed`.

`calls` implements the operations, and `work.OperationQueue` orders them. A group has two communicators, so that
collectives never match the user's messages.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist

from hpcdist import collectives
from hpcdist.checkpoint.state import finish_saves, is_saving
from hpcdist.collectives.dispatch import parse_algorithm
from hpcdist.comm.communicator import ANY, Communicator
from hpcdist.comm.start import refuse_worker
from hpcdist.comm.transport import attribute, call_site_outside
from hpcdist.errors import UsageError
from hpcdist.torch import calls, streams
from hpcdist.torch.buffers import Buffer, as_list, buffers_of, coalesced_inputs, devices_of, dtype_name
from hpcdist.torch.calls import is_asynchronous, op_of, reduction_of, root_of
from hpcdist.torch.messages import Mailbox
from hpcdist.torch.streams import Streams
from hpcdist.torch.work import NO_SIZE, NO_TIMEOUT, BatchWork, CollectiveWork, OperationQueue, Work

NAME: Final = "hpcdist"
# Operations are attributed to the innermost line outside of PyTorch and this package.
OUTSIDE: Final = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep)
# Recorded names of operations whose function has another name.
_NAMES: Final = {
    calls.allreduce: "all_reduce",
    calls.all_gather_list: "all_gather",
    calls.reduce_scatter_list: "reduce_scatter",
    calls.all_to_all_list: "all_to_all",
}
# Operations whose result has the same size on all ranks.
ONE_SIZE: Final = (calls.allreduce, calls.broadcast, calls.reduce, calls.all_gather, calls.all_gather_list)
ENGINE: Final = os.path.join(os.path.dirname(torch.__file__), "autograd") + os.sep
_ProcessGroup: Any = dist.ProcessGroup  # its type stubs lack a constructor and some methods


@dataclass(frozen=True)
class Options:
    """Options of a process group, passed as ``pg_options=`` to `init_process_group` and `new_group`."""

    algorithm: str = "auto"  # of allreduce: a name, a table printed by `hpcdist tune`, or "auto" (measured once)

    def __post_init__(self) -> None:
        if self.algorithm != "auto":
            parse_algorithm(self.algorithm)


class Group(_ProcessGroup):
    """PyTorch process group of the ranks of the communicator ``comm``. Construction is collective over ``comm``."""

    # ``limit(communicator name, timeout)`` sets a timeout. `shutdown` calls ``at_end`` before it frees the
    # communicator.
    def __init__(
        self,
        comm: Communicator,
        options: Options,
        at_end: Callable[[], None] = lambda: None,
        limit: Callable[[str, timedelta], None] = lambda name, timeout: None,
    ) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm, self.options, self._at_end, self._limit = comm, options, at_end, limit
        has_thread = comm.size > 1 and comm.supports("thread_multiple")
        self._queue = OperationQueue(comm.name, has_thread, lambda: comm.events)
        self._mailbox = Mailbox(comm.dup("messages"), has_thread)
        self._group_name, self._group_description = comm.name, ""
        self._batch: list[Work] | None = None  # of an active coalescing manager
        self._finished = Work([])  # returned by blocking operations: PyTorch does not read its result
        self._finished.end()
        self._streams: Streams | None = None  # of this group's GPU, set by its first GPU tensor
        self._ended = False
        self._backward, self._buckets = -1, 0  # graph task of the last backward pass, and its number of DDP buckets
        self._duplicate: Communicator | None = None

    def communicator(self) -> Communicator:
        """Return a communicator of the same ranks for other functions of hpcdist. The first call is collective."""
        # A separate context: operations of this group may be in flight in its thread.
        if self._duplicate is None:
            duplicates: list[Communicator] = []
            self._queue.run("", NO_SIZE, lambda: duplicates.append(self.comm.dup("outside")), None)
            self._duplicate = duplicates[0]
        return self._duplicate

    def submit(self, run: Callable[[], object], result: Sequence[torch.Tensor], name: str) -> Work:
        """Queue ``run``, whose collective ``name`` writes the tensors ``result``. Return a `Work` handle."""
        gpu_streams = self._streams_for({tensor.device for tensor in result}) if streams.HAS_GPU else None
        site = call_site_outside(sys._getframe(1), OUTSIDE)
        return self._queue.start(CollectiveWork(self._queue, run, result, site, gpu_streams, name))

    def _run(
        self,
        name: str,
        run: Callable[[], object],
        result: Sequence[torch.Tensor],
        opts: Any,
        gpu_streams: Streams | None = None,
        size: tuple[str, int] = NO_SIZE,
    ) -> Work:
        # ``run`` writes the tensors ``result``.
        self._check_lives()
        site = call_site_outside(sys._getframe(1), OUTSIDE)
        timeout, blocks = getattr(opts, "timeout", NO_TIMEOUT), not is_asynchronous(opts)  # negative if not set
        if blocks and gpu_streams is None and timeout <= NO_TIMEOUT:
            self._queue.run(name, size, run, site)
            return self._finished if self._batch is None else self._entered(self._finished)
        work = CollectiveWork(self._queue, run, result, site, gpu_streams, name, size)
        work.default_timeout = max(timeout, NO_TIMEOUT)
        self._queue.start(work, wake=not blocks or timeout > NO_TIMEOUT)
        if blocks:
            work.wait()  # the host waits until the operation is enqueued; the current CUDA stream, until it ends
        return self._entered(work)

    def _run_each(
        self,
        call: Callable[..., None],
        arguments: Sequence[Any],
        result: Sequence[torch.Tensor],
        opts: Any,
        name: str = "",
    ) -> Work:
        run = partial(call, self.comm, *arguments[0]) if len(arguments) == 1 else partial(self._call, call, arguments)
        gpu_streams = self._streams_for(devices_of(arguments)) if streams.HAS_GPU else None
        size = NO_SIZE
        if result and (call in ONE_SIZE or call is calls.reduce_scatter):
            count = result[0].numel() if len(result) == 1 else sum([tensor.numel() for tensor in result])
            size = dtype_name(result[0].dtype), count if call in ONE_SIZE else count * self.comm.size
        return self._run(name or _NAMES.get(call) or call.__name__, run, result, opts, gpu_streams, size)

    def _call(self, call: Callable[..., None], arguments: Sequence[Any]) -> None:
        for values in arguments:
            call(self.comm, *values)

    def _streams_for(self, devices: set[torch.device]) -> Streams | None:
        if len(devices) > 1:
            raise UsageError(
                f"the tensors of one operation are on {' and '.join(sorted(map(str, devices)))}; move all tensors to "
                "one GPU"
            )
        device = next(iter(devices), None)
        if device is None or device.type == "cpu":
            return None
        if self._streams is None:
            if self.options.algorithm == "nccl":
                streams.check_cupy("Options(algorithm='nccl')")
            self._streams = Streams(device)
        if device != self._streams.device:
            raise UsageError(
                f"a tensor is on {device}, but earlier tensors of the process group {self._group_name} were on "
                f"{self._streams.device}; use one GPU per process: torch.device('cuda', LOCAL_RANK)"
            )
        return self._streams

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Bind this group to the GPU ``device``. PyTorch calls this method with the user's ``device_id``. Local."""
        self._streams_for({device})
        self.bound_device_id = device

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing. PyTorch calls this method on ranks that are not members of a new group. Local."""

    def _check_lives(self) -> None:
        refuse_worker()
        if self._ended:
            raise UsageError(f"the process group {self._group_name} was destroyed; create a new group")

    def _entered(self, handle: Work) -> Work:
        if self._batch is not None:
            self._batch.append(handle)
        return handle

    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        tensors, algorithm = as_list(tensors), self.options.algorithm
        each = [(Buffer(tensor), reduction_of(op_of(opts), tensor), algorithm) for tensor in tensors]
        return self._run_each(calls.allreduce, each, tensors, opts, self._bucket(sys._getframe(1), tensors[0]))

    def _bucket(self, caller: FrameType | None, tensor: torch.Tensor) -> str:
        # Return the name of the allreduce of a bucket, or "". DistributedDataParallel calls `allreduce` from C++ in the
        # backward pass: once per bucket in order, then for its int32 map of unused parameters.
        backward = torch._C._current_graph_task_id()
        if backward < 0 or not (tensor.is_floating_point() or tensor.is_complex()):
            return ""
        if caller is not None and not caller.f_code.co_filename.startswith(ENGINE):
            return ""
        if backward != self._backward:
            self._backward, self._buckets = backward, 0
        self._buckets += 1
        return f"all_reduce bucket {self._buckets - 1}"

    def allreduce_coalesced(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        tensors, algorithm = as_list(tensors), self.options.algorithm
        each = [
            (buffer, reduction_of(op_of(opts), tensor), algorithm)
            for buffer, tensor in zip(coalesced_inputs(tensors, tensors), tensors, strict=True)
        ]
        return self._run_each(calls.allreduce, each, tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        tensors, root = as_list(tensors), root_of(opts)
        return self._run_each(calls.broadcast, [(Buffer(tensor), root) for tensor in tensors], tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        tensors, root, algorithm = as_list(tensors), root_of(opts), self.options.algorithm
        each = [(Buffer(tensor), reduction_of(op_of(opts), tensor), root, algorithm) for tensor in tensors]
        return self._run_each(calls.reduce, each, tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Work:
        if outputs and isinstance(outputs[0], torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        pairs = list(zip(map(buffers_of, outputs), coalesced_inputs(inputs, *zip(*outputs, strict=False)), strict=True))
        for tensors in outputs:
            calls.check_count(tensors, self.comm.size, "all_gather")
        return self._run_each(calls.all_gather_list, pairs, [tensor for tensors in outputs for tensor in tensors], opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self.allgather([[tensors[index] for tensors in outputs] for index in range(len(inputs))], inputs, opts)

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None, *_: Any) -> Work:
        """Fill ``output`` with the ``tensor`` of every rank, in rank order. Collective."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            calls.check_pair("all_gather", output, tensor, output.numel(), tensor.numel() * self.comm.size)
        pairs = list(zip(buffers_of(outputs), coalesced_inputs(inputs, outputs), strict=True))
        return self._run_each(calls.all_gather, pairs, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Work:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        for tensors in inputs:
            calls.check_count(tensors, self.comm.size, "reduce_scatter")
        pairs = zip(outputs, inputs, strict=True)
        each = [(Buffer(output), buffers_of(tensors), reduction_of(op_of(opts), output)) for output, tensors in pairs]
        return self._run_each(calls.reduce_scatter_list, each, outputs, opts)

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None, *_: Any) -> Work:
        """Reduce ``tensor`` over all ranks. ``output`` on rank r is the r-th of equal result chunks. Collective."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            calls.check_pair("reduce_scatter", output, tensor, output.numel() * self.comm.size, tensor.numel())
        pairs = zip(outputs, coalesced_inputs(inputs, outputs), strict=True)
        each = [(Buffer(output), tensor, reduction_of(op_of(opts), output)) for output, tensor in pairs]
        return self._run_each(calls.reduce_scatter, each, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self,
        output: Any,
        tensor: Any,
        output_sizes: Sequence[int] | None,
        input_sizes: Sequence[int] | None,
        opts: Any = None,
    ) -> Work:
        calls.check_pair("all_to_all", output, tensor)
        sent = calls.row_ranges(tensor, input_sizes, self.comm.size, "input")
        received = calls.row_ranges(output, output_sizes, self.comm.size, "output")
        return self._run_each(calls.all_to_all, [(Buffer(tensor), Buffer(output), sent, received)], [output], opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Work:
        calls.check_count(outputs, self.comm.size, "all_to_all")
        calls.check_count(inputs, self.comm.size, "all_to_all")
        return self._run_each(calls.all_to_all_list, [(buffers_of(inputs), buffers_of(outputs))], outputs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Work:
        root = root_of(opts)
        received = self._of_root(outputs, root, "gather")
        result = [tensor for tensors in outputs for tensor in tensors] or inputs
        return self._run_each(calls.gather, [(received, Buffer(inputs[0]), root)], result, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Work:
        root = root_of(opts)
        sent = self._of_root(inputs, root, "scatter")
        return self._run_each(calls.scatter, [(Buffer(outputs[0]), sent, root)], outputs, opts)

    def _of_root(self, lists: Any, root: int, name: str) -> list[Buffer]:
        if self.comm.rank != root:
            return []
        buffers = buffers_of([tensor for tensors in lists for tensor in tensors])
        calls.check_count(buffers, self.comm.size, name)
        return buffers

    def barrier(self, opts: Any = None, *_: Any) -> Work:
        """Wait for all ranks, and for the GPU to finish the work on the current stream. Collective."""
        start_event = streams.mark_current() if self._streams is None else None  # the group's GPU is unknown

        def run() -> None:
            if start_event is not None:
                start_event.synchronize()
            elif self._streams is not None:
                self._streams.mark().synchronize()
            self.comm.barrier()

        return self._run("barrier", run, [], opts, self._streams)

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        seconds = timeout.total_seconds()
        self._queue.run("", NO_SIZE, lambda: calls.monitored_barrier(self.comm, seconds, wait_all_ranks), None)

    def send(self, tensors: Any, peer: int, tag: int) -> Work:
        gpu_streams = self._check_message(tensors, peer)
        return self._entered(self._mailbox.send(tensors[0], peer, tag, gpu_streams))

    def recv(self, tensors: Any, peer: int, tag: int) -> Work:
        gpu_streams = self._check_message(tensors, peer)
        return self._entered(self._mailbox.receive(tensors[0], peer, tag, gpu_streams))

    def recv_anysource(self, tensors: Any, tag: int) -> Work:
        gpu_streams = self._check_message(tensors, 0)
        return self._entered(self._mailbox.receive(tensors[0], ANY, tag, gpu_streams))

    def _check_message(self, tensors: Sequence[torch.Tensor], peer: int) -> Streams | None:
        self._check_lives()
        if len(tensors) != 1:
            raise UsageError(f"a message must be one tensor, got {len(tensors)} tensors; send each tensor separately")
        if not 0 <= peer < self.comm.size:
            raise UsageError(f"rank {peer} is not in this process group; use a rank from 0 to {self.comm.size - 1}")
        return self._streams_for({tensors[0].device}) if tensors[0].is_cuda else None

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Work:
        batch, self._batch = self._batch or [], None
        return BatchWork(batch)

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> "Group | None":
        """Return a new group of the ranks ``new_ranks`` of this group, or None on other ranks. Collective."""
        # Ranks of several disjoint groups make this call together.
        is_member = self.comm.rank in new_ranks
        child = self.comm.split(*((new_ranks[0], list(new_ranks).index(self.comm.rank)) if is_member else (None, 0)))
        if child is None:
            return None
        group = Group(child, opts if isinstance(opts, Options) else self.options, limit=self._limit)
        if timeout is not None:
            group.set_timeout(timeout)
        group._set_group_name(group_name or child.name)
        group._set_group_desc(group_desc or "")
        return group

    def shutdown(self) -> None:
        """Complete the queued collectives, and free the group. Point-to-point messages have 1 s to end. Collective."""
        self._ended = True
        self._queue.close()
        self._mailbox.finish()
        self._mailbox.close()
        attribute(call_site_outside(sys._getframe(1), OUTSIDE))
        events = self.comm.events  # `_at_end` may replace the sink, and only this sink knows the token
        token = events.begin(self.comm.name, "destroy_process_group", "uint8", 0, 0, -1, 0)
        self._at_end()
        events.end(token)
        attribute(None)
        collectives.release(self.comm)
        if self._duplicate is not None:
            if is_saving(self._duplicate):
                finish_saves(self._duplicate)
            collectives.release(self._duplicate)
            self._duplicate.free()
        self._mailbox.comm.free()
        self.comm.free()

    def abort(self) -> None:
        """Abandon the operations and messages in flight, without waiting for other ranks. Local."""
        self._mailbox.close()

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = ["cpu", *(["cuda"] if streams.HAS_GPU else [])]
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: torch.device) -> "Group":
        return self

    # PyTorch stores names in the backends of a group, which this class does not have.

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, description: str) -> None:
        self._group_description = description

    def getGroupName(self) -> str:  # noqa: N802 (a name of PyTorch)
        return self._group_name

    def getGroupDesc(self) -> str:  # noqa: N802 (a name of PyTorch)
        return self._group_description

    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False

    def _get_backend_name(self) -> str:
        return NAME

    getBackendName = name = _get_backend_name  # noqa: N815 (names of PyTorch)

    def _set_sequence_number_for_group(self) -> None:
        return  # the recorder numbers operations

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of operations: an operation that takes longer than ``timeout`` ends the job. Local."""
        self._limit(self.comm.name, timeout)

    _set_default_timeout = set_timeout
