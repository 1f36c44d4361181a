"""Process group of PyTorch over a communicator of hpcdist: every operation of `torch.distributed`.

`Group` takes the arguments that PyTorch passes to a backend: lists of tensors and options. What an operation does is
in `calls`, as functions of a communicator and buffers; here are their order (`work.OperationQueue`) and their handles.
A group has two communicators of its own: collectives never meet messages of the user, whatever their tags.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from hpcdist import collectives
from hpcdist.arrays.gpu import device as gpu
from hpcdist.collectives.dispatch import parse_algorithm
from hpcdist.comm.communicator import ANY, Communicator
from hpcdist.comm.events import attribute, call_site
from hpcdist.comm.start import refuse_worker
from hpcdist.errors import UsageError
from hpcdist.torch import calls, streams
from hpcdist.torch.buffers import Buffer, coalesced_inputs, devices_of
from hpcdist.torch.messages import Mailbox
from hpcdist.torch.reductions import reduction_of
from hpcdist.torch.streams import Streams
from hpcdist.torch.work import NO_TIMEOUT, BatchWork, CollectiveWork, OperationQueue, Work

NAME: Final = "hpcdist"
# Operations are attributed to the line of the program, behind the files of PyTorch and of this package.
OUTSIDE: Final = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep)
_ProcessGroup: Any = dist.ProcessGroup  # whose types know neither its other constructor nor all of its methods


@dataclass(frozen=True)
class Options:
    """Options of a group, as ``pg_options=`` of `init_process_group` and `new_group`.

    ``algorithm`` is an allreduce by name, a table of names by size as `hpcdist tune` prints it, or "auto": chosen by
    measurement, and kept for later starts. Raises UsageError for an unknown name.
    """

    algorithm: str = "auto"

    def __post_init__(self) -> None:
        if self.algorithm != "auto":
            parse_algorithm(self.algorithm)


class Group(_ProcessGroup):
    """The ranks of ``comm``, which it takes over, as a process group. Construction is collective over ``comm``.

    ``at_end`` is called by `shutdown`, on all ranks. ``limit(name, timeout)`` sets the deadline of a communicator.
    """

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
        self._batch: list[Work] | None = None  # of a coalescing manager
        self._streams: Streams | None = None  # of the GPU of this group, from its first tensor there on
        self._ended = False

    def submit(self, run: Callable[[], object], result: Sequence[torch.Tensor]) -> Work:
        """Let ``run``, a collective over `comm`, be run in the order of this group; ``result`` is what it writes."""
        gpu_streams = self._streams_for({tensor.device for tensor in result}) if streams.HAS_GPU else None
        site = call_site(sys._getframe(1), OUTSIDE)
        return self._queue.start(CollectiveWork(self._queue, run, result, site, gpu_streams))

    def _run(
        self,
        name: str,
        run: Callable[[], object],
        result: Sequence[torch.Tensor],
        opts: Any,
        gpu_streams: Streams | None = None,
    ) -> Work:
        """Return the handle of the operation ``run``, which has ended unless ``opts`` want it asynchronous.

        The recorder has it as ``name``, around what it is made of.
        ``gpu_streams`` are those of tensors in GPU memory: then it has ended for what comes on the current stream.
        """
        self._check_lives()
        work = CollectiveWork(self._queue, run, result, call_site(sys._getframe(1), OUTSIDE), gpu_streams, name)
        work.timeout = max(getattr(opts, "timeout", NO_TIMEOUT), NO_TIMEOUT)  # negative if it is not set
        if _is_asynchronous(opts):
            self._queue.start(work)
        else:
            if work.timeout:
                self._queue.start(work).wait()
            else:
                self._queue.run(work)
            if gpu_streams is not None:
                work.hold_back()
        return self._entered(work)

    def _run_each(
        self, call: Callable[..., None], arguments: Sequence[Any], result: Sequence[torch.Tensor], opts: Any
    ) -> Work:
        """Return the handle of ``call(comm, *each)`` for each of ``arguments``, as `_run` does."""

        def run() -> None:
            for each in arguments:
                call(self.comm, *each)

        gpu_streams = self._streams_for(devices_of(arguments)) if streams.HAS_GPU else None
        name = call.__name__.removesuffix("_list").replace("allreduce", "all_reduce")
        return self._run(name, run, result, opts, gpu_streams)

    def _streams_for(self, devices: set[torch.device]) -> Streams | None:
        """Return the streams of tensors on ``devices``, None of tensors in host memory (local).

        The first GPU is that of the group. Raises UsageError for several devices, or another GPU.
        """
        if len(devices) > 1:
            raise UsageError(
                f"the tensors of one operation are on {' and '.join(sorted(map(str, devices)))}; bring them to one"
            )
        device = next(iter(devices), None)
        if device is None or device.type == "cpu":
            return None
        if self._streams is None:
            self._streams = Streams(device)
        if device != self._streams.device:
            raise UsageError(
                f"a tensor is on {device}, and the group {self._group_name} communicates from {self._streams.device}; "
                "give each process one GPU: torch.device('cuda', LOCAL_RANK)"
            )
        return self._streams

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Let ``device``, that of `init_process_group`, be the GPU of this group (local)."""
        self._streams_for({device})
        self.bound_device_id = device

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing for a group that this rank is not in: it is made by its members alone."""

    def _check_lives(self) -> None:
        refuse_worker()
        if self._ended:
            raise UsageError(f"the process group {self._group_name} was destroyed; make another one")

    def _entered(self, handle: Work) -> Work:
        if self._batch is not None:
            self._batch.append(handle)
        return handle

    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        """Reduce each of ``tensors`` in place over all ranks. Collective."""
        tensors, algorithm = _as_list(tensors), self.options.algorithm
        each = [(Buffer(tensor), reduction_of(_op(opts), tensor), algorithm) for tensor in tensors]
        return self._run_each(calls.allreduce, each, tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        """Do as `allreduce` does; tensors that overlap in memory are all read before one is written. Collective."""
        tensors, algorithm = _as_list(tensors), self.options.algorithm
        each = [
            (buffer, reduction_of(_op(opts), tensor), algorithm)
            for buffer, tensor in zip(coalesced_inputs(tensors, tensors), tensors, strict=True)
        ]
        return self._run_each(calls.allreduce, each, tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        """Overwrite each of ``tensors`` with that of the root. Collective."""
        tensors, root = _as_list(tensors), _root(opts)
        return self._run_each(calls.broadcast, [(Buffer(tensor), root) for tensor in tensors], tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        """Reduce each of ``tensors`` into that of the root; those of other ranks keep their values. Collective."""
        tensors, root, algorithm = _as_list(tensors), _root(opts), self.options.algorithm
        each = [(Buffer(tensor), reduction_of(_op(opts), tensor), root, algorithm) for tensor in tensors]
        return self._run_each(calls.reduce, each, tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Work:
        """Fill each list of ``outputs`` with the tensors of all ranks, whose sizes may differ. Collective."""
        if outputs and isinstance(outputs[0], torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        pairs = list(zip(map(_buffers, outputs), coalesced_inputs(inputs, *zip(*outputs, strict=False)), strict=True))
        for ones in outputs:
            calls.check_count(ones, self.comm.size, "all_gather")
        return self._run_each(calls.all_gather_list, pairs, [tensor for ones in outputs for tensor in ones], opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Fill ``outputs[r]`` with the tensors of each rank r, which are ``inputs`` there. Collective."""
        return self.allgather([[ones[place] for ones in outputs] for place in range(len(inputs))], inputs, opts)

    def all_gather_single(self, output: Any, own: Any, opts: Any = None, *_: Any) -> Work:
        """Fill ``output`` with the tensors of all ranks, one behind the other. Collective."""
        return self.all_gather_single_coalesced([output], [own], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Work:
        """Do as `all_gather_single` does for several tensors. Collective."""
        for output, own in zip(outputs, inputs, strict=True):
            calls.check_pair("all_gather", output, own, output.numel(), own.numel() * self.comm.size)
        pairs = list(zip(_buffers(outputs), coalesced_inputs(inputs, outputs), strict=True))
        return self._run_each(calls.all_gather, pairs, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Work:
        """Put the reduction of every rank's list at this rank's place into each of ``outputs``. Collective."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        for ones in inputs:
            calls.check_count(ones, self.comm.size, "reduce_scatter")
        pairs = zip(outputs, inputs, strict=True)
        each = [(Buffer(output), _buffers(ones), reduction_of(_op(opts), output)) for output, ones in pairs]
        return self._run_each(calls.reduce_scatter_list, each, outputs, opts)

    def reduce_scatter_single(self, output: Any, own: Any, opts: Any = None, *_: Any) -> Work:
        """Put this rank's part of the reduction of ``own`` into ``output``. Collective."""
        return self.reduce_scatter_single_coalesced([output], [own], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Work:
        """Do as `reduce_scatter_single` does for several tensors. Collective."""
        for output, own in zip(outputs, inputs, strict=True):
            calls.check_pair("reduce_scatter", output, own, output.numel() * self.comm.size, own.numel())
        pairs = zip(outputs, coalesced_inputs(inputs, outputs), strict=True)
        each = [(Buffer(output), own, reduction_of(_op(opts), output)) for output, own in pairs]
        return self._run_each(calls.reduce_scatter, each, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self,
        output: Any,
        own: Any,
        output_sizes: Sequence[int] | None,
        input_sizes: Sequence[int] | None,
        opts: Any = None,
    ) -> Work:
        """Send rows of ``own`` to all ranks, and theirs to ``output``; without sizes as many to each. Collective."""
        calls.check_pair("all_to_all", output, own)
        sent = calls.row_ranges(own, input_sizes, self.comm.size, "input")
        received = calls.row_ranges(output, output_sizes, self.comm.size, "output")
        return self._run_each(calls.all_to_all, [(Buffer(own), Buffer(output), sent, received)], [output], opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Work:
        """Send ``inputs[q]`` to each rank q, and receive ``outputs[q]`` from it; sizes may differ. Collective."""
        calls.check_count(outputs, self.comm.size, "all_to_all")
        calls.check_count(inputs, self.comm.size, "all_to_all")
        return self._run_each(calls.all_to_all_list, [(_buffers(inputs), _buffers(outputs))], outputs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Work:
        """Fill the root's list with the tensors of all ranks. Collective."""
        root = _root(opts)
        received = self._of_root(outputs, root, "gather")
        result = [tensor for ones in outputs for tensor in ones] or inputs
        return self._run_each(calls.gather, [(received, Buffer(inputs[0]), root)], result, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Work:
        """Fill each rank's tensor with the one of the root's list at its place. Collective."""
        root = _root(opts)
        sent = self._of_root(inputs, root, "scatter")
        return self._run_each(calls.scatter, [(Buffer(outputs[0]), sent, root)], outputs, opts)

    def _of_root(self, lists: Any, root: int, name: str) -> list[Buffer]:
        """Return one buffer for each rank of what the root gave, nothing on the others (local)."""
        if self.comm.rank != root:
            return []
        buffers = _buffers([tensor for tensors in lists for tensor in tensors])
        calls.check_count(buffers, self.comm.size, name)
        return buffers

    def barrier(self, opts: Any = None, *_: Any) -> Work:
        """Return when all ranks have called, and the GPU has done what is on the current stream. Collective."""
        start_event = streams.mark_current() if self._streams is None else None  # the GPU of the group is not known

        def run() -> None:
            if start_event is not None:
                start_event.synchronize()
            elif self._streams is not None:
                gpu.produced()
            self.comm.barrier()

        return self._run("barrier", run, [], opts, self._streams)

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        """Return when all ranks have called. Collective.

        Raises DeadlineError on every rank that has called when one has not within ``timeout``; rank 0 names it, or all
        of them with ``wait_all_ranks``.
        """
        seconds = timeout.total_seconds()
        self._queue.run(
            CollectiveWork(self._queue, lambda: calls.monitored_barrier(self.comm, seconds, wait_all_ranks), [])
        ).wait()

    def send(self, tensors: Any, peer: int, tag: int) -> Work:
        """Begin to send one tensor to ``peer`` (local)."""
        gpu_streams = self._check_message(tensors, peer)
        return self._entered(self._mailbox.send(tensors[0], peer, tag, gpu_streams))

    def recv(self, tensors: Any, peer: int, tag: int) -> Work:
        """Begin to receive one tensor from ``peer`` (local)."""
        gpu_streams = self._check_message(tensors, peer)
        return self._entered(self._mailbox.receive(tensors[0], peer, tag, gpu_streams))

    def recv_anysource(self, tensors: Any, tag: int) -> Work:
        """Begin to receive one tensor from any rank (local)."""
        gpu_streams = self._check_message(tensors, 0)
        return self._entered(self._mailbox.receive(tensors[0], ANY, tag, gpu_streams))

    def _check_message(self, tensors: Sequence[torch.Tensor], peer: int) -> Streams | None:
        """Return the streams of the tensor, if it is in GPU memory."""
        self._check_lives()
        if len(tensors) != 1:
            raise UsageError(f"a message is one tensor, got {len(tensors)}")
        if not 0 <= peer < self.comm.size:
            raise UsageError(f"rank {peer} is none of this group: they are 0 to {self.comm.size - 1}")
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
        """Return the group of ``new_ranks`` of this one, None on other ranks. Collective over this group."""
        is_member = self.comm.rank in new_ranks
        child = self.comm.split(*((0, list(new_ranks).index(self.comm.rank)) if is_member else (None, 0)))
        if child is None:
            return None
        group = Group(child, opts if isinstance(opts, Options) else self.options, limit=self._limit)
        if timeout is not None:
            group.set_timeout(timeout)
        group._set_group_name(group_name or child.name)
        group._set_group_desc(group_desc or "")
        return group

    def shutdown(self) -> None:
        """End what is under way, and give the communicators back. Collective."""
        self._ended = True
        self._queue.close()
        self._mailbox.finish()
        self._mailbox.close()
        attribute(call_site(sys._getframe(1), OUTSIDE))
        token = self.comm.events.begin(self.comm.name, "destroy_process_group", "uint8", 0, 0, -1, 0)
        self._at_end()
        self.comm.events.end(token)
        attribute(None)
        collectives.release(self.comm)
        self._mailbox.comm.free()
        self.comm.free()

    def abort(self) -> None:
        """Give messages under way up, without the other ranks (local)."""
        self._mailbox.close()

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = ["cpu", *(["cuda"] if streams.HAS_GPU else [])]
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: torch.device) -> "Group":
        return self

    # Names are kept by the backends of a group, and this one has none.

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, description: str) -> None:
        self._group_description = description

    def getGroupName(self) -> str:  # noqa: N802 (a name of PyTorch)
        """Return the name under which PyTorch registered the group."""
        return self._group_name

    def getGroupDesc(self) -> str:  # noqa: N802 (a name of PyTorch)
        """Return the description of the group."""
        return self._group_description

    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False

    def _get_backend_name(self) -> str:
        return NAME

    getBackendName = name = _get_backend_name  # noqa: N815 (names of PyTorch)

    def _set_sequence_number_for_group(self) -> None:
        return  # operations are numbered by the recorder

    def set_timeout(self, timeout: timedelta) -> None:
        """Let an operation of this group that takes longer than ``timeout`` end the job (local)."""
        self._limit(self.comm.name, timeout)

    _set_default_timeout = set_timeout


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _buffers(tensors: Sequence[torch.Tensor]) -> list[Buffer]:
    return [Buffer(tensor) for tensor in tensors]


# Instead of its options an operation may be given a root or a reduction alone.


def _root(options: Any) -> int:
    root: int = options if isinstance(options, int) else getattr(options, "rootRank", 0)
    return root


def _op(options: Any) -> Any:
    if isinstance(options, dist.ReduceOp):
        return options
    if isinstance(options, dist.ReduceOp.RedOpType):
        return dist.ReduceOp(options)
    return dist.ReduceOp(dist.ReduceOp.SUM) if options is None else options.reduceOp


def _is_asynchronous(options: Any) -> bool:
    return bool(getattr(options, "asyncOp", True))
