"""Exchange on the data axis in a step: bytes of gradients and parameters, seconds, and the exposed part.

Psi are the bytes of one device's parameters on the wire, p the ranks that have the same ones (those of the data axis,
times those of the context axis), m micro-batches; a device sends

    allreduce           2 Psi (p-1)/p                    once a step
    zero1               Psi (p-1)/p + Psi (p-1)/p        gradients to their owners; parameters back, after the update
    zero2               (1 + m) Psi (p-1)/p              gradients after each micro-batch
    zero3               3 m Psi (p-1)/p                  and parameters twice for each; 4 m where a pipeline of
                                                         hpcdist computes blocks again. Uses of the last unit follow
                                                         each other, as those of the first do: less
    parameter_server    Psi, and Psi comes back          dedicated: p Psi / s go into and out of each of s servers
                        2 Psi (p-1)/p                    colocated (servers = 0): every rank serves its share

ZeRO: S. Rajbhandari et al., arXiv:1910.02054, section 7; the rest: `hpcdist.strategies`. Servers work in lock-step.
Into a dedicated one p workers send at the same time (incast): the bytes queue at its link, its messages are handled
one after the other, and all gradients pass its memory. A switch that drops packets then, as Ethernet may, is slower
still. Each place on the pipeline and tensor axes has servers of its own.

Gradients are sent while the backward goes on: at most ``overlap`` of them, never those of the unit that is computed
last (nothing is left to hide behind), and no longer than there is backward. What ZeRO-3 gathers hides in the same way
behind both passes, but for the first unit of each. Parameters of zero1 and zero2, and what workers pull, come after
the update: exposed. Compressed sums: `hpcdist.planner.time.gradient_payloads`.

A unit is a message here. For the published implementation ZeRO-3 goes tensor by tensor, `TENSORS` of a block, as
DeepSpeed did when Megatron-LM was compared with it (arXiv:2104.04473, table 2). `TENSORS` was chosen because that
table shows latencies, for blocks like those alone: so the table is no test of it. All the same the planner is 26 to
92 % faster than its six rows; no other published ZeRO-3 was compared with it.

hpcdist sums gradients in buckets of communication.bucket_bytes, 4 MiB by default (`hpcdist.comm.config`). Long
buckets begin late and take memory; latencies of short ones add up. A plan begins with the default, and takes longer
buckets where these leave less exposed and memory is there for them; then a flag names the value. The published
implementation begins with a message for each unit.
"""

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from hpcdist.comm.config import BUCKET_BYTES
from hpcdist.errors import UsageError
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.layout import HALVES, STRATEGIES, ParallelLayout
from hpcdist.planner.memory.model_states import WIDE, exchanged, unsharded
from hpcdist.planner.time import gradient_payloads
from hpcdist.planner.time.gradient_payloads import (
    STORED_ITEM_BYTES,
    CompressedGradients,
    Matrices,
    Payload,
    compressed_sum,
    gradient_item_bytes,
)
from hpcdist.planner.time.network import NO_COST, MessageCost, collective, repeated_cost, span, substituted

WORTHWHILE: Final = 0.9  # the share of what is exposed that longer buckets may leave, to be worth asking for
TENSORS: Final = 12  # of a block of GPT: two norms and four products, weight and bias each; see above


class BucketChoice(NamedTuple):
    """Cost of all messages, the seconds of it that hide, and the gradients of a bucket, in bytes as they are stored."""

    cost: MessageCost
    hidden_s: float
    bucket_bytes: float


class BucketedGradients(NamedTuple):
    """Gradients of a device: ``parameters`` of them, ``nbytes`` as they are stored, complete ``units`` at a time.

    They may hide in the ``backward_s`` of a micro-batch, and take ``spare_bytes`` of memory more than by default.
    """

    parameters: float
    nbytes: float
    units: int
    backward_s: float
    spare_bytes: float


def choose_bucket(
    gradients: BucketedGradients, layout: ParallelLayout, cost_of: Callable[[int], MessageCost]
) -> BucketChoice:
    """Return the fastest length of buckets; ``cost_of`` gives the cost of so many of them (local)."""
    # Lengths are tried from the shortest on, each twice the last. Ours begin with the default of a recipe; the
    # published implementation with a message for each unit, of no less than the same bytes.
    is_ours = layout.implementation == "hpcdist"
    short = max(1, min(gradients.units, int(gradients.nbytes // BUCKET_BYTES)))
    count = math.ceil(gradients.nbytes / BUCKET_BYTES) if is_ours else short
    best, default_s = BucketChoice(NO_COST, -math.inf, 0.0), 0.0
    while count:
        bucket = gradients.nbytes / count
        if is_ours and default_s and _more(gradients, layout, bucket) > gradients.spare_bytes:
            break
        cost, parts = cost_of(count), min(count, gradients.units)  # nothing is left to hide the last unit behind
        # Only a part of the messages may hide, and no longer than there is a backward; what is left is exposed.
        may_s = layout.overlap * cost.seconds * (parts - 1) / parts
        left_s = cost.seconds - min(may_s, gradients.backward_s)
        default_s = default_s or left_s
        if left_s < (WORTHWHILE if is_ours else 1) * (best.cost.seconds - best.hidden_s):
            best = BucketChoice(cost, cost.seconds - left_s, bucket)
        # Longer ones would begin later, and all that may hide does.
        if may_s <= gradients.backward_s and (may_s or not is_ours):
            break
        count //= 2
    if not is_ours or best.bucket_bytes <= BUCKET_BYTES:
        return best
    flag = (
        f"allreduce in buckets of {best.bucket_bytes / 2**20:.3g} MiB, not {BUCKET_BYTES >> 20}: needs "
        f"communication.bucket_bytes = {math.ceil(best.bucket_bytes)}, and leaves "
        f"{best.cost.seconds - best.hidden_s:.3g} s exposed in place of {default_s:.3g} s"
    )
    return best._replace(cost=best.cost._replace(flags=(*best.cost.flags, flag)))


def _more(gradients: BucketedGradients, layout: ParallelLayout, bucket_bytes: float) -> float:
    """Return the bytes that such buckets take beyond those of the default."""
    return exchanged(layout, gradients.parameters, 0.0, bucket_bytes) - exchanged(layout, gradients.parameters, 0.0)


class ExchangeCost(NamedTuple):
    """Seconds of a step that wait for the data axis, and those behind computation; bytes that a device sends.

    ``server_nbytes`` are those that a dedicated server sends, 0 without one; ``bucket_bytes`` those of gradients, as
    they are stored, that an allreduce sums at a time, 0 without one.
    """

    exposed_s: float
    hidden_s: float
    nbytes: float
    algorithm: str
    flags: tuple[str, ...] = ()
    server_nbytes: float = 0.0
    bucket_bytes: float = 0.0

    def plus(self, other: "ExchangeCost") -> "ExchangeCost":
        """Return the cost of both exchanges, one after the other."""
        flags = tuple(dict.fromkeys((*self.flags, *other.flags)))
        names = dict.fromkeys(name for name in (self.algorithm, other.algorithm) if name != "none")
        return ExchangeCost(
            self.exposed_s + other.exposed_s,
            self.hidden_s + other.hidden_s,
            self.nbytes + other.nbytes,
            " + ".join(names) or "none",
            flags,
            self.server_nbytes + other.server_nbytes,
            max(self.bucket_bytes, other.bucket_bytes),
        )


NO_EXCHANGE: Final = ExchangeCost(0.0, 0.0, 0.0, "none")


def exchange(
    parameters: float,
    layout: ParallelLayout,
    cluster: Cluster,
    backward_s: float,
    microbatches: int = 1,
    *,
    forward_s: float = 0.0,
    units: int = 1,
    expert_parameters: float = 0.0,
    ends: tuple[float, float] = (0.0, 0.0),
    matrices: Matrices = (),
    spare_bytes: float = math.inf,
) -> ExchangeCost:
    """Return the exchange of a step for a device with ``parameters`` numbers, of one pipeline and tensor place.

    ``backward_s`` and ``forward_s`` are those of one micro-batch on this device. The parameters are sent in ``units``
    messages, as many as the device has units; an allreduce goes in longer buckets where that is faster, and of hpcdist
    where they take no more than ``spare_bytes`` of memory beyond those of its default (`hpcdist.comm.config`). Of them
    ``expert_parameters`` are shared by data x context / expert ranks only, and ``ends`` are those of the first and the
    last unit, which zero3 gathers less often. ``matrices`` (rows, columns, count) are for compression of low rank;
    without them, square ones are assumed.
    Raises UsageError for a strategy that is none.
    """
    if layout.strategy not in STRATEGIES:
        raise UsageError(f"strategy {layout.strategy!r}; choose one of {', '.join(STRATEGIES)}")
    common = parameters - expert_parameters if layout.expert > 1 else parameters
    by_tensor = layout.strategy == "zero3" and layout.implementation == "megatron"
    messages = max(1, units) * (TENSORS if by_tensor else 1)
    job = _Job(layout, cluster, backward_s, forward_s, max(1, microbatches), messages, ends, matrices, spare_bytes)
    cost = job.of(common, "replicas", layout.data * layout.context)
    if layout.expert > 1:
        replicas = layout.data * layout.context // layout.expert
        cost = cost.plus(job.of(expert_parameters, "expert_replicas", replicas))
    return cost


class _Job(NamedTuple):
    """Exchange to be timed: a layout on a cluster, the passes that may hide it, and how it is cut into messages."""

    layout: ParallelLayout
    cluster: Cluster
    backward_s: float
    forward_s: float
    microbatches: int
    units: int
    ends: tuple[float, float]
    matrices: Matrices
    spare_bytes: float

    def of(self, parameters: float, axis: str, ranks: int) -> ExchangeCost:
        """Return the exchange of ``parameters`` over the ``ranks`` of an axis."""
        strategy = self.layout.strategy
        if parameters <= 0 or (ranks <= 1 and not (strategy == "parameter_server" and self.layout.servers)):
            return NO_EXCHANGE
        if strategy == "parameter_server":
            return self._servers(parameters, axis, ranks)
        if strategy == "allreduce":
            return self._allreduce(parameters, axis)
        return self._zero(parameters, axis)

    def _allreduce(self, parameters: float, axis: str) -> ExchangeCost:
        is_coded = self._payload(parameters) is not None
        nbytes = parameters * (WIDE if is_coded else unsharded(self.layout).gradient)
        gradients = BucketedGradients(parameters, nbytes, self.units, self.backward_s, self.spare_bytes)
        choice = choose_bucket(
            gradients, self.layout, lambda count: self._gradients("allreduce", parameters, axis, count)
        )
        whole_s = choice.cost.seconds, choice.hidden_s
        return self._result(whole_s, 0.0, choice.cost)._replace(bucket_bytes=choice.bucket_bytes)

    def _zero(self, parameters: float, axis: str) -> ExchangeCost:
        layout, m = self.layout, self.microbatches
        stage = int(layout.strategy[-1])
        often = 1 if stage == 1 else m
        # To 16-bit gradients our owners come by sending them to each other, whatever the algorithm of the rest is.
        is_direct = layout.implementation == "hpcdist" and layout.precision in HALVES
        operation = "all_to_all" if is_direct else "reduce_scatter"
        scatter = self._gradients(operation, parameters, axis, self.units)
        gather = self._in_messages("all_gather", parameters * STORED_ITEM_BYTES[layout.precision], axis, self.units)
        if stage < 3:
            return self._result(
                self._hide(scatter.seconds * often, often), gather.seconds, repeated_cost(scatter, often), gather
            )
        recomputes = layout.implementation == "hpcdist" and layout.recompute == "full" and layout.pipeline > 1
        # A forward, a recomputation and a backward each gather all units. The last unit is still there when its
        # backward follows its forward; the first one when the next micro-batch's forward follows its backward.
        first, last = (end / parameters for end in self.ends) if axis == "replicas" else (0.0, 0.0)
        uses = (3 if recomputes else 2) * m - m * last - (m - 1) * first
        # One gather goes with each forward; the others, and the gradients, with the backward.
        forward = min(self._hideable(gather.seconds * m), m * self.forward_s)
        backward_s = scatter.seconds * m + gather.seconds * (uses - m)
        backward = min(self._hideable(backward_s), m * self.backward_s)
        return self._result(
            (backward_s + gather.seconds * m, forward + backward),
            0.0,
            repeated_cost(scatter, m),
            repeated_cost(gather, uses),
        )

    def _servers(self, parameters: float, axis: str, ranks: int) -> ExchangeCost:
        """Return push and pull in lock-step; the pull waits for the update, which `hpcdist.planner.time.step` times."""
        layout, cluster = self.layout, self.cluster
        payload = self._payload(parameters, ranks)
        pushed = parameters * gradient_item_bytes(layout) if payload is None else payload.nbytes
        pulled = float(parameters * STORED_ITEM_BYTES[layout.precision])
        coding_s = 0.0 if payload is None else payload.seconds(cluster)
        per_byte = 1 / (cluster.device.memory_bytes_per_s * cluster.device.memory_share)
        if not layout.servers:
            group = span(layout, axis, cluster)
            push = collective("all_to_all", pushed, group, cluster, layout.algorithm)
            push = push if payload else push._replace(flags=(*push.flags, *self._useless()))
            pull = collective("all_to_all", pulled, group, cluster)
            sums_s = pushed * per_byte * 3  # each of p shares is read, and the sum so far read and written
            whole = push.seconds + sums_s + coding_s, self._hide(push.seconds, 1)[1]
            return self._result(whole, pull.seconds, push, pull)._replace(algorithm="colocated servers")
        push_s = self._incast(pushed, ranks) + ranks * pushed * per_byte * 3 / self._servers_each
        pull_s = self._incast(pulled, ranks)
        hidden = self._hide(push_s, 1)[1]
        return ExchangeCost(
            push_s - hidden + pull_s + coding_s,
            hidden,
            pushed,
            "dedicated servers",
            (
                "incast: queues at the servers' links, no lost packets",
                *(() if payload else self._useless()),
                *self._ignored("push and pull", "messages to each server"),
            ),
            ranks * pulled / self._servers_each,
        )

    @property
    def _servers_each(self) -> float:
        """Servers of each place on the other axes; less than one where places share."""
        layout = self.layout
        return layout.servers / (layout.pipeline * layout.tensor)

    def _incast(self, nbytes: float, workers: int) -> float:
        """Return the seconds in which ``workers`` send ``nbytes`` each to all servers, or get them from these."""
        levels, total, servers = self.cluster.levels, self.layout.devices, self.layout.servers
        place = next(
            (i for i, level in enumerate(levels) if not level.devices or level.devices >= total), len(levels) - 1
        )
        level = levels[place]
        box = levels[place - 1].devices if place else 1
        most = level.alone_bytes_per_s or level.bytes_per_s
        each = self._servers_each
        # Servers fill boxes of their own, so they share a box's link only with each other.
        into = min(most, level.bytes_per_s * box / min(servers, box))
        out_of = level.bytes_per_s
        messages = max(self.units, each)  # of a worker: each unit's values are with one server, or cut over several
        at_server = workers * (messages / each * level.latency_s + nbytes / each / into)
        return max(at_server, messages * level.latency_s + nbytes / out_of)

    def _gradients(self, operation: str, parameters: float, axis: str, messages: int) -> MessageCost:
        """Return the sum of gradients, compressed where the layout says so, with encoding and decoding."""
        plain = self._in_messages(operation, parameters * gradient_item_bytes(self.layout), axis, messages)
        if self._payload(parameters) is None:
            return plain._replace(flags=(*plain.flags, *self._useless()))
        gradients = CompressedGradients(parameters, self.units, self.matrices)
        way = "allreduce" if operation == "allreduce" else "reduce_scatter"
        cost = compressed_sum(way, gradients, self.layout, axis, self.cluster, messages)
        if cost.seconds <= plain.seconds:
            return cost
        slower = f"{self.layout.compression} takes {cost.seconds:.3g} s, gradients as they are {plain.seconds:.3g} s"
        return cost._replace(flags=(*cost.flags, slower))

    def _payload(self, parameters: float, ranks: int = 2) -> Payload | None:
        """Return what is sent in place of gradients; None where that is no less than they are."""
        payload = gradient_payloads.payload(self.layout.compression, parameters, ranks, self.units, self.matrices)
        if payload is None or payload.nbytes >= 0.999 * parameters * gradient_item_bytes(self.layout):
            return None
        return payload

    def _useless(self) -> tuple[str, ...]:
        name = self.layout.compression
        return () if name == "none" else (f"{name}: no fewer bytes than the gradients have; they travel as they are",)

    def _ignored(self, operation: str, taken: str) -> tuple[str, ...]:
        name = self.layout.algorithm
        return () if name == "auto" else (substituted(name, operation, taken),)

    def _in_messages(self, operation: str, nbytes: float, axis: str, messages: int) -> MessageCost:
        """Return so many collectives one after the other."""
        layout = self.layout
        reach = span(layout, axis, self.cluster)
        cost = collective(operation, nbytes / messages, reach, self.cluster, layout.algorithm)
        return repeated_cost(cost, messages)

    def _hideable(self, seconds: float) -> float:
        """Return how much of messages for all units may hide: not those of one unit."""
        return self.layout.overlap * seconds * (self.units - 1) / self.units

    def _hide(self, seconds: float, often: int) -> tuple[float, float]:
        """Return (all, hidden) of gradients that are sent behind the last ``often`` backwards."""
        return seconds, min(self._hideable(seconds), often * self.backward_s)

    def _result(self, whole: tuple[float, float], after_s: float, *costs: MessageCost) -> ExchangeCost:
        seconds, hidden = whole
        return ExchangeCost(
            seconds - hidden + after_s,
            hidden,
            sum(cost.nbytes for cost in costs),
            " + ".join(dict.fromkeys(cost.algorithm for cost in costs)),
            tuple(dict.fromkeys(flag for cost in costs for flag in cost.flags)),
        )
