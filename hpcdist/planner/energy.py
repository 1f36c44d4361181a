"""Energy of a step: power of devices by phase, hosts and network, plus cooling.

A device draws idle power + utilisation * (peak power - idle power). Hosts and switches draw constant power.
Utilisation:

    computing   COMPUTE_FLOOR + (1 - COMPUTE_FLOOR) * reached share of the peak FLOP rate
    update      MEMORY_UTILISATION, also for the term "unproven"
    messages    MESSAGE_UTILISATION, only exposed messages
    waiting     WAITING_UTILISATION: pipeline bubble, input, checkpoints and restarts

COMPUTE_FLOOR is fitted to eight H100 at 45 % of peak, which draw with their host 76 % of 10.2 kW (arXiv:2506.14551).
The other values are assumptions, consistent with arXiv:2308.12908.
"""

from typing import Final

from hpcdist.planner.cluster.hardware import Cluster, Device
from hpcdist.planner.estimate import CORRECTION, UNPROVEN, StepEnergy, TimeEstimate
from hpcdist.planner.layout import ParallelLayout

COMPUTE_FLOOR: Final = 0.75
MEMORY_UTILISATION: Final = 0.6
MESSAGE_UTILISATION: Final = 0.35
WAITING_UTILISATION: Final = 0.15
COMPUTING: Final = ("forward", "backward", "recompute")
SENDING: Final = ("tensor", "context", "expert", "pipeline", "data", "rows", CORRECTION)
ASSUMED: Final = (
    f"energy: assumption: of the power between idle and peak, a device draws {MEMORY_UTILISATION:.0%} in updates, "
    f"{MESSAGE_UTILISATION:.0%} in exposed messages and {WAITING_UTILISATION:.0%} while it waits"
)


def energy(timing: TimeEstimate, layout: ParallelLayout, cluster: Cluster, peak_share: float) -> StepEnergy:
    """Return the energy of a training step on all nodes, in joules, by devices, hosts, network and cooling.

    ``timing``: estimated step time. ``peak_share``: fraction of the peak FLOP rate that computing devices reach.
    """
    device, nodes, step_s = cluster.device, nodes_of(layout, cluster), timing.step_s
    worker_j = 0.0
    for name, seconds in timing.terms.items():
        is_served = name == "update" and layout.servers
        worker_j += seconds * power_w(device, WAITING_UTILISATION if is_served else utilisation(name, peak_share))
    exchange_s, update_s = timing.terms.get("data", 0.0), timing.terms.get("update", 0.0)
    server_j = exchange_s * power_w(device, MESSAGE_UTILISATION) + update_s * power_w(device, MEMORY_UTILISATION)
    server_j += (step_s - exchange_s - update_s) * power_w(device, WAITING_UTILISATION)
    workers = layout.devices - layout.servers
    unused = devices_held(layout, cluster) - layout.devices
    terms = {}
    if device.peak_w:
        terms["devices"] = workers * worker_j + layout.servers * server_j + unused * device.idle_w * step_s
    if cluster.node.host_w:
        terms["hosts"] = nodes * cluster.node.host_w * step_s
    if cluster.node.network_w:
        terms["network"] = nodes * cluster.node.network_w * step_s
    if cluster.site.pue is not None:
        terms["cooling"] = (cluster.site.pue - 1) * sum(terms.values())
    return StepEnergy(terms=terms, device_w=worker_j / step_s if step_s else 0.0)


def utilisation(term: str, peak_share: float) -> float:
    """Return a device's utilisation (0 to 1) in step phase ``term``. ``peak_share``: achieved / peak FLOP rate."""
    if term in COMPUTING:
        return COMPUTE_FLOOR + (1 - COMPUTE_FLOOR) * min(1.0, max(0.0, peak_share))
    if term in ("update", UNPROVEN):
        return MEMORY_UTILISATION
    return MESSAGE_UTILISATION if term in SENDING else WAITING_UTILISATION


def power_w(device: Device, busy: float) -> float:
    """Return the power of ``device`` in W at utilisation ``busy`` (0: idle power, 1: peak power)."""
    return device.idle_w + (device.peak_w - device.idle_w) * busy


def waiting_w(layout: ParallelLayout, cluster: Cluster) -> float:
    """Return the power in W of all nodes of ``layout``, with cooling, during a checkpoint or restart."""
    nodes, site = nodes_of(layout, cluster), cluster.site
    devices_w = (
        devices_held(layout, cluster) * power_w(cluster.device, WAITING_UTILISATION) if cluster.device.peak_w else 0.0
    )
    return (devices_w + nodes * (cluster.node.host_w + cluster.node.network_w)) * (site.pue or 1.0)


def nodes_of(layout: ParallelLayout, cluster: Cluster) -> int:
    """Return the number of nodes that ``layout`` needs."""
    return -(-layout.devices // cluster.node.devices)


def devices_held(layout: ParallelLayout, cluster: Cluster) -> int:
    """Return the number of devices on the nodes that ``layout`` needs, including unused devices."""
    return max(layout.devices, min(cluster.devices, nodes_of(layout, cluster) * cluster.node.devices))


def unknown_terms(cluster: Cluster) -> tuple[str, ...]:
    """Return warnings about energy terms that are left out, because ``cluster`` lacks data, or are assumed."""
    terms = (
        (cluster.device.peak_w, "the power of a device is unknown: its energy is left out"),
        (cluster.node.host_w, "the power of a host is unknown: its energy is left out"),
        (cluster.node.network_w, "the power of the network is unknown: its energy is left out"),
        (cluster.site.pue, "the PUE is unknown: the energy of cooling is left out"),
    )
    left_out = tuple(text for is_known, text in terms if not is_known)
    return (*left_out, ASSUMED) if cluster.device.peak_w else left_out
