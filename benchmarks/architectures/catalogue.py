"""Models, device counts, and architectures with their layouts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from hpcdist.planner.cluster.hardware import Cluster, LinkLevel
from hpcdist.planner.layout import ParallelLayout

COUNTS: Final = tuple(8 << doubling for doubling in range(15))  # 8 to 131,072 devices
SERVED: Final = 8  # devices for each dedicated server, including the server
MICROBATCHES: Final = (64, 32, 16, 8, 4, 2, 1)
DEPTHS: Final = (1, 2, 4, 8, 16, 32, 64)  # pipeline depths
RECOMPUTE: Final = ("none", "selective", "full")
# Published kernels and 16-bit gradients everywhere, for the communication volumes of the literature. hpcdist itself
# sums float32 in its allreduces and sends 16 bits to ZeRO owners (`hpcdist.planner.time.gradient_payloads`).
BASE: Final = ParallelLayout(
    implementation="megatron-2022", precision="bfloat16", main_gradients="working", library="mpi"
)


@dataclass(frozen=True)
class Scenario:
    """A model on a cluster, with a fixed batch (strong scaling) or a batch that grows with the devices (weak scaling).

    ``batch``: samples per step, or per step and device if ``weak``. ``node_bits_per_s``: the speed of the one link that
    a node uses for all traffic (Ethernet), or 0 for the cluster's own network.
    """

    name: str
    model: str
    batch: float
    weak: bool
    node_bits_per_s: float = 0.0

    def samples(self, devices: int) -> int:
        return round(self.batch * devices) if self.weak else round(self.batch)

    def on(self, cluster: Cluster) -> Cluster:
        """Return ``cluster`` with this scenario's network and enough devices."""
        cluster = replace(cluster, devices=max(cluster.devices, COUNTS[-1]))
        if not self.node_bits_per_s:
            return cluster
        inside = cluster.levels[0]
        # Assumptions: TCP payload is 94 % of the line rate with 1500-byte frames; kernel and switches take 30 us.
        line = 0.94 * self.node_bits_per_s / 8
        wire = LinkLevel(
            name=f"{self.node_bits_per_s / 1e9:g} Gbit/s Ethernet",
            devices=0,
            latency_s=30e-6,
            bytes_per_s=line / cluster.node.devices,
            alone_bytes_per_s=line,
        )
        return replace(cluster, levels=(inside, wire))

    @property
    def title(self) -> str:
        batch = f"{self.batch:g} samples a device" if self.weak else f"{self.batch:,.0f} samples a step"
        wire = f", {self.node_bits_per_s / 1e9:g} Gbit/s a node" if self.node_bits_per_s else ""
        return f"{self.model}, {'weak' if self.weak else 'strong'} scaling, {batch}{wire}"


SCENARIOS: Final = (
    Scenario("small-strong", "bert-large", 32768, weak=False),
    Scenario("small-weak", "bert-large", 64, weak=True),
    Scenario("small-slow", "bert-large", 64, weak=True, node_bits_per_s=25e9),
    Scenario("large-strong", "gpt3-175b", 2048, weak=False),
    Scenario("large-weak", "gpt3-175b", 2, weak=True),
)


Grids = Callable[[int], Iterator[ParallelLayout]]  # maps a device count to the layouts of an architecture


@dataclass(frozen=True)
class Architecture:
    """A rule that connects devices. ``grids`` yields its layouts without micro-batch and recomputation."""

    name: str
    label: str
    grids: Grids = field(repr=False)


def _servers(count: Callable[[int], int]) -> Grids:
    def grids(devices: int) -> Iterator[ParallelLayout]:
        servers = count(devices)
        yield replace(BASE, data=devices - servers, servers=servers, strategy="parameter_server")

    return grids


def _flat(strategy: str, *algorithms: tuple[str, str], compressions: tuple[str, ...] = ("none",)) -> Grids:
    def grids(devices: int) -> Iterator[ParallelLayout]:
        for library, algorithm in algorithms:
            for compression in compressions:
                keys = {"library": library, "algorithm": algorithm, "compression": compression}
                yield replace(BASE, data=devices, strategy=strategy, **keys)  # type: ignore[arg-type]

    return grids


def _pipelines(devices: int) -> Iterator[ParallelLayout]:
    for depth in DEPTHS[1:]:
        if devices % depth == 0:
            yield replace(BASE, data=devices // depth, pipeline=depth)


def _cubes(devices: int) -> Iterator[ParallelLayout]:
    for tensor in (1, 2, 4, 8):
        for depth in DEPTHS:
            if tensor * depth > 1 and devices % (tensor * depth) == 0:
                inner = {"tensor": tensor, "pipeline": depth, "sequence_parallel": tensor > 1}
                for schedule in ("1f1b", "zb-h1") if depth > 1 else ("1f1b",):
                    yield replace(BASE, data=devices // (tensor * depth), strategy="zero1", schedule=schedule, **inner)  # type: ignore[arg-type]


def _sharded(devices: int) -> Iterator[ParallelLayout]:
    for tensor in (2, 4, 8):
        for library in ("mpi", "nccl"):
            keys = {"tensor": tensor, "sequence_parallel": True, "library": library}
            yield replace(BASE, data=devices // tensor, strategy="zero3", **keys)  # type: ignore[arg-type]


_ANY: Final = (("mpi", "hierarchical"), ("mpi", "auto"), ("nccl", "auto"))
ARCHITECTURES: Final = (
    Architecture("one-server", "one parameter server", _servers(lambda devices: 1)),
    Architecture("servers", f"1 of {SERVED} serves", _servers(lambda devices: devices // SERVED)),
    Architecture("colocated", "every device serves", _servers(lambda devices: 0)),
    Architecture("ring", "one ring", _flat("allreduce", ("mpi", "ring"))),
    Architecture("rings", "ring per link", _flat("allreduce", ("nccl", "ring"))),
    Architecture("tree", "double tree per link", _flat("allreduce", ("nccl", "tree"))),
    Architecture("hierarchical", "hierarchical", _flat("allreduce", ("mpi", "hierarchical"))),
    Architecture(
        "compressed",
        "hierarchical, compressed",
        _flat("allreduce", ("mpi", "auto"), compressions=("int8", "onebit", "powersgd")),
    ),
    Architecture("zero1", "ZeRO-1", _flat("zero1", *_ANY)),
    Architecture("zero2", "ZeRO-2", _flat("zero2", *_ANY)),
    Architecture("zero3", "ZeRO-3", _flat("zero3", *_ANY)),
    Architecture("2d", "tensor x ZeRO-3", _sharded),
    Architecture("pipeline", "pipeline x data", _pipelines),
    Architecture("3d", "tensor x pipeline x ZeRO-1", _cubes),
)
