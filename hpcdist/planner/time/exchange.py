"""Exchange on the data axis in a step: bytes of gradients and parameters, seconds, and the exposed part.

Psi: bytes of a device's parameters on the wire. p: ranks with the same parameters (data times context axis). m:
micro-batches. A device sends

    allreduce           2 Psi (p-1)/p                    once per step
    zero1               Psi (p-1)/p + Psi (p-1)/p        reduce-scatter of gradients; all-gather after the update
    zero2               (1 + m) Psi (p-1)/p              reduce-scatter after each micro-batch
    zero3               3 m Psi (p-1)/p                  4 m if a pipeline of hpcdist recomputes; less for the ends
    parameter_server    Psi, and Psi is received         dedicated: p Psi / s go into and out of each of s servers
                        2 Psi (p-1)/p                    colocated (servers = 0): every rank serves its share

ZeRO: arXiv:1910.02054, section 7. At a dedicated server, bytes queue at its link, and all gradients pass its memory.

Gradients overlap backward: at most the fraction ``overlap``, without the unit computed last, and at most the backward
time. Gathers of ZeRO-3 overlap both passes. Other gathers and the parameters of servers are exposed.
"""

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from hpcdist.comm.config import BUCKET_BYTES
from hpcdist.constants import HALVES
from hpcdist.errors import UsageError
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.layout import STRATEGIES, ParallelLayout
from hpcdist.planner.memory.model_states import WIDE, buffer_bytes, unsharded
from hpcdist.planner.model.stage_split import recomputes_ahead
from hpcdist.planner.time import gradient_payloads
from hpcdist.planner.time.gradient_payloads import (
    STORED_ITEM_BYTES,
    CompressedGradients,
    Matrices,
    Payload,
    compressed_sum,
    gradient_item_bytes,
)
from hpcdist.planner.time.network import NO_COST, MessageCost, collective, repeated_cost, span, substitute_warning

WORTHWHILE: Final = 0.9  # longer buckets must reduce the exposed time to this share
# Messages of Megatron-LM's ZeRO-3 per GPT block: two norms and four products, weight and bias each. Chosen for
# arXiv:2104.04473, table 2, so this table does not validate it. The planner is 26 to 92 % faster than its six rows.
TENSORS: Final = 12


class BucketChoice(NamedTuple):
    """Chosen size of gradient buckets, total cost of the allreduces, and seconds that overlap computation."""

    cost: MessageCost
    hidden_s: float
    bucket_bytes: float


class BucketedGradients(NamedTuple):
    """Gradients of a device, to be sent in buckets. One allreduce sums the gradients in a bucket."""

    parameters: float  # number of parameters
    nbytes: float  # bytes to send
    units: int  # number of model layers
    backward_s: float  # computation that messages may overlap
    spare_bytes: float  # free memory for buckets above the default size


def choose_bucket(
    gradients: BucketedGradients, layout: ParallelLayout, cost_of: Callable[[int], MessageCost]
) -> BucketChoice:
    """Choose the size of gradient buckets that minimises the communication time outside of computation.

    ``cost_of(n)``: function that returns the cost of sending ``gradients`` in n buckets.
    """
    # Lengths are tried in ascending order, doubling each time. hpcdist starts with the default of a recipe, the
    # published implementation with a message per unit, but at least the same bytes.
    grows = layout.kernels.grows_buckets
    short = max(1, min(gradients.units, int(gradients.nbytes // BUCKET_BYTES)))
    count = math.ceil(gradients.nbytes / BUCKET_BYTES) if grows else short
    best, default_s = BucketChoice(NO_COST, -math.inf, 0.0), 0.0
    while count:
        bucket = gradients.nbytes / count
        if grows and default_s and _more(gradients, layout, bucket) > gradients.spare_bytes:
            break
        cost, parts = cost_of(count), min(count, gradients.units)  # the last unit has nothing to overlap
        # Only a share of the messages may overlap, and no longer than backward takes; the rest is exposed.
        hideable_s = layout.overlap * cost.seconds * (parts - 1) / parts
        exposed_s = cost.seconds - min(hideable_s, gradients.backward_s)
        default_s = default_s or exposed_s
        if exposed_s < (WORTHWHILE if grows else 1) * (best.cost.seconds - best.hidden_s):
            best = BucketChoice(cost, cost.seconds - exposed_s, bucket)
        # Longer buckets would start later, and everything that may overlap already does.
        if hideable_s <= gradients.backward_s and (hideable_s or not grows):
            break
        count //= 2
    if not grows or best.bucket_bytes <= BUCKET_BYTES:
        return best
    flag = (
        f"allreduce uses buckets of {best.bucket_bytes / 2**20:.3g} MiB instead of {BUCKET_BYTES >> 20}; set "
        f"communication.bucket_bytes = {math.ceil(best.bucket_bytes)}, which leaves "
        f"{best.cost.seconds - best.hidden_s:.3g} s exposed instead of {default_s:.3g} s"
    )
    return best._replace(cost=best.cost._replace(flags=(*best.cost.flags, flag)))


def _more(gradients: BucketedGradients, layout: ParallelLayout, bucket_bytes: float) -> float:
    return buffer_bytes(layout, gradients.parameters, 0.0, bucket_bytes) - buffer_bytes(
        layout, gradients.parameters, 0.0
    )


class ExchangeCost(NamedTuple):
    """Cost of the exchange of gradients and parameters between data-parallel replicas, per step."""

    exposed_s: float
    hidden_s: float  # overlaps computation
    nbytes: float  # sent by a device
    algorithm: str
    flags: tuple[str, ...] = ()
    server_nbytes: float = 0.0  # sent by a dedicated server
    bucket_bytes: float = 0.0  # gradient bytes per allreduce

    def plus(self, other: "ExchangeCost") -> "ExchangeCost":
        """Return the total cost of this exchange and the exchange ``other``, one after the other."""
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
    parameters: float,  # number on the device, including ``expert_parameters``
    layout: ParallelLayout,
    cluster: Cluster,
    backward_s: float,
    microbatches: int = 1,  # per step
    *,
    forward_s: float = 0.0,  # of a micro-batch
    units: int = 1,  # model layers on the device
    expert_parameters: float = 0.0,
    ends: tuple[float, float] = (0.0, 0.0),  # parameters of the first and last layer, which zero3 gathers less often
    matrices: Matrices = (),  # (rows, columns, count) per weight shape, for powersgd; (): square
    spare_bytes: float = math.inf,  # free memory for allreduce buckets above the default size
) -> ExchangeCost:
    """Return the cost of the exchange of gradients and parameters between data-parallel replicas in a step.

    ``parameters``: number of parameters on a device. ``backward_s``: seconds of the backward pass of a micro-batch,
    which may overlap the exchange. ``microbatches``: number of micro-batches per step. Raises UsageError.
    """
    if layout.strategy not in STRATEGIES:
        raise UsageError(f"unknown strategy {layout.strategy!r}; choose one of {', '.join(STRATEGIES)}")
    common = parameters - expert_parameters if layout.expert > 1 else parameters
    by_tensor = layout.strategy == "zero3" and layout.kernels.gathers_by_tensor
    messages = max(1, units) * (TENSORS if by_tensor else 1)
    job = _Job(layout, cluster, backward_s, forward_s, max(1, microbatches), messages, ends, matrices, spare_bytes)
    cost = job.of(common, "replicas", layout.data * layout.context)
    if layout.expert > 1:
        replicas = layout.data * layout.context // layout.expert
        cost = cost.plus(job.of(expert_parameters, "expert_replicas", replicas))
    return cost


class _Job(NamedTuple):
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
        # Whatever algorithm is set.
        is_direct = layout.kernels.sends_to_owners and layout.precision in HALVES
        operation = "all_to_all" if is_direct else "reduce_scatter"
        scatter = self._gradients(operation, parameters, axis, self.units)
        gather = self._in_messages("all_gather", parameters * STORED_ITEM_BYTES[layout.precision], axis, self.units)
        if stage < 3:
            seconds, hidden = self._hide(scatter.seconds * often, often, scatter.nbytes * often)
            if layout.kernels.hides_gathers:
                hidden += min(self._hideable(gather.seconds, gather.nbytes), self.forward_s)
            return self._result((seconds + gather.seconds, hidden), 0.0, repeated_cost(scatter, often), gather)
        recomputes = recomputes_ahead(layout)
        # Forward, recomputation and backward each gather all units. The last unit is kept if its backward follows its
        # forward; the first unit if the next micro-batch's forward follows its backward.
        first, last = (end / parameters for end in self.ends) if axis == "replicas" else (0.0, 0.0)
        uses = (3 if recomputes else 2) * m - m * last - (m - 1) * first
        # One gather overlaps each forward; the other gathers, and the gradients, overlap backward.
        forward = min(self._hideable(gather.seconds * m, gather.nbytes * m), m * self.forward_s)
        backward_s = scatter.seconds * m + gather.seconds * (uses - m)
        backward_bytes = scatter.nbytes * m + gather.nbytes * (uses - m)
        backward = min(self._hideable(backward_s, backward_bytes), m * self.backward_s)
        return self._result(
            (backward_s + gather.seconds * m, forward + backward),
            0.0,
            repeated_cost(scatter, m),
            repeated_cost(gather, uses),
        )

    def _servers(self, parameters: float, axis: str, ranks: int) -> ExchangeCost:
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
            sums_s = pushed * per_byte * 3  # each of p shares is read, and the partial sum is read and written
            whole = push.seconds + sums_s + coding_s, self._hide(push.seconds, 1)[1]
            return self._result(whole, pull.seconds, push, pull)._replace(algorithm="colocated servers")
        push_s = self._incast(pushed, ranks) + ranks * pushed * per_byte * 3 / self._servers_each
        pull_s = self._incast(pulled, ranks)
        hidden = self._hide(push_s, 1)[1]
        flags = ["incast: queues at the servers' links, no lost packets", *(() if payload else self._useless())]
        if layout.algorithm != "auto":
            flags.append(substitute_warning(layout.algorithm, "push and pull", "messages to each server"))
        return ExchangeCost(
            push_s - hidden + pull_s + coding_s,
            hidden,
            pushed,
            "dedicated servers",
            tuple(flags),
            ranks * pulled / self._servers_each,
        )

    @property
    def _servers_each(self) -> float:
        layout = self.layout
        return layout.servers / (layout.pipeline * layout.tensor)  # below 1: pipeline and tensor ranks share a server

    def _incast(self, nbytes: float, workers: int) -> float:
        levels, total, servers = self.cluster.levels, self.layout.devices, self.layout.servers
        place = next(
            (i for i, level in enumerate(levels) if not level.devices or level.devices >= total), len(levels) - 1
        )
        level = levels[place]
        box_devices = levels[place - 1].devices if place else 1
        alone_rate = level.alone_bytes_per_s or level.bytes_per_s
        each = self._servers_each
        # Servers fill separate boxes, so only servers share a box's link.
        in_rate = min(alone_rate, level.bytes_per_s * box_devices / min(servers, box_devices))
        out_rate = level.bytes_per_s
        messages = max(self.units, each)  # per worker: the values of a unit are on one server, or split over several
        at_server = workers * (messages / each * level.latency_s + nbytes / each / in_rate)
        return max(at_server, messages * level.latency_s + nbytes / out_rate)

    def _gradients(self, operation: str, parameters: float, axis: str, messages: int) -> MessageCost:
        plain = self._in_messages(operation, parameters * gradient_item_bytes(self.layout), axis, messages)
        if self._payload(parameters) is None:
            return plain._replace(flags=(*plain.flags, *self._useless()))
        gradients = CompressedGradients(parameters, self.units, self.matrices)
        way = "allreduce" if operation == "allreduce" else "reduce_scatter"
        cost = compressed_sum(way, gradients, self.layout, axis, self.cluster, messages)
        if cost.seconds <= plain.seconds:
            return cost
        slower = f"{self.layout.compression} takes {cost.seconds:.3g} s, uncompressed gradients {plain.seconds:.3g} s"
        return cost._replace(flags=(*cost.flags, slower))

    def _payload(self, parameters: float, ranks: int = 2) -> Payload | None:
        payload = gradient_payloads.payload(self.layout.compression, parameters, ranks, self.units, self.matrices)
        if payload is None or payload.nbytes >= 0.999 * parameters * gradient_item_bytes(self.layout):
            return None
        return payload

    def _useless(self) -> tuple[str, ...]:
        name = self.layout.compression
        return () if name == "none" else (f"{name} does not reduce the bytes; gradients are sent uncompressed",)

    def _in_messages(self, operation: str, nbytes: float, axis: str, messages: int) -> MessageCost:
        layout = self.layout
        reach = span(layout, axis, self.cluster)
        cost = collective(operation, nbytes / messages, reach, self.cluster, layout.algorithm)
        return repeated_cost(cost, messages)

    def _hideable(self, seconds: float, nbytes: float) -> float:
        # Messages slow the computation that they overlap, as long as they would take on the fastest links.
        slowed = 1 - self.layout.kernels.fit(self.cluster.device.name).overlap
        slowed_s = slowed * min(seconds, nbytes / self.cluster.levels[0].bytes_per_s)
        return self.layout.overlap * (seconds - slowed_s) * (self.units - 1) / self.units  # not the last unit's

    def _hide(self, seconds: float, often: int, nbytes: float = 0.0) -> tuple[float, float]:
        return seconds, min(self._hideable(seconds, nbytes), often * self.backward_s)

    def _result(self, whole: tuple[float, float], after_s: float, *costs: MessageCost) -> ExchangeCost:
        seconds, hidden = whole
        return ExchangeCost(
            seconds - hidden + after_s,
            hidden,
            sum(cost.nbytes for cost in costs),
            " + ".join(dict.fromkeys(cost.algorithm for cost in costs)),
            tuple(dict.fromkeys(flag for cost in costs for flag in cost.flags)),
        )
