"""Joules of a step: power of devices by phase, of hosts and of the network, and the overhead of cooling.

A device draws between its idle and its peak power, linear in a utilisation, which is that of the phase:

    computing   COMPUTE_FLOOR + (1 - COMPUTE_FLOOR) * share of the peak that is reached
    update      MEMORY: elementwise kernels, which the memory's bandwidth bounds; so, too, what is unproven
    messages    MESSAGES: exposed ones, when a device sends and computes nothing
    waiting     WAITING: the bubble of a pipeline, the input, saves and restarts

COMPUTE_FLOOR is such that eight H100 that train draw, with their host, the 76 % of 10.2 kW that were measured
(arXiv:2506.14551, host as in `clusters/h100-hgx.toml`) when they reach 45 % of their peak. That devices draw much
less between the computations, down to little above idle, is measured, too (Patel et al., arXiv:2308.12908); the three
other numbers are assumptions within that. Messages that hide behind computation are not counted once more.

Processors and switches are taken to draw the same all the time. Whole nodes count: the devices of a node that a
layout does not use are idle. What is not known is left out, and `unknown` says so.
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
JOULES_PER_KWH: Final = 3.6e6
ASSUMED: Final = (
    f"energy: assumption: of the power between idle and peak, a device draws {MEMORY_UTILISATION:.0%} in updates, "
    f"{MESSAGE_UTILISATION:.0%} in exposed messages and {WAITING_UTILISATION:.0%} while it waits"
)


def energy(timing: TimeEstimate, layout: ParallelLayout, cluster: Cluster, peak_share: float) -> StepEnergy:
    """Return the joules of a step of ``timing`` on all nodes of ``layout``.

    ``peak_share`` (0 to 1) is the part of their peak that the devices reach while they compute: operations of the
    hardware over peak and the seconds of the terms `COMPUTING`. Servers of a parameter server send while there is an
    exchange, update while their workers wait for that, and wait else. ``device_w`` of the result is the mean power of a
    device that computes.
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
    """Return how busy a device is during a term of `TimeEstimate`, 0 to 1."""
    if term in COMPUTING:
        return COMPUTE_FLOOR + (1 - COMPUTE_FLOOR) * min(1.0, max(0.0, peak_share))
    if term in ("update", UNPROVEN):
        return MEMORY_UTILISATION
    return MESSAGE_UTILISATION if term in SENDING else WAITING_UTILISATION


def power_w(device: Device, busy: float) -> float:
    """Return the watts of a device that is busy for a share ``busy``: as in `hpcdist.energy.sources.utilisation`."""
    return device.idle_w + (device.peak_w - device.idle_w) * busy


def waiting_w(layout: ParallelLayout, cluster: Cluster) -> float:
    """Return the watts of all nodes of ``layout``, with cooling, while the devices wait, as for a save or a restart."""
    nodes, site = nodes_of(layout, cluster), cluster.site
    devices_w = (
        devices_held(layout, cluster) * power_w(cluster.device, WAITING_UTILISATION) if cluster.device.peak_w else 0.0
    )
    return (devices_w + nodes * (cluster.node.host_w + cluster.node.network_w)) * (site.pue or 1.0)


def nodes_of(layout: ParallelLayout, cluster: Cluster) -> int:
    """Return how many nodes hold the devices of ``layout``."""
    return -(-layout.devices // cluster.node.devices)


def devices_held(layout: ParallelLayout, cluster: Cluster) -> int:
    """Return how many devices are on the nodes of ``layout``, used or not."""
    return max(layout.devices, min(cluster.devices, nodes_of(layout, cluster) * cluster.node.devices))


def unknown_terms(cluster: Cluster) -> tuple[str, ...]:
    """Return what of the energy is assumed, or not known for this cluster and left out, for the flags of a plan."""
    parts = (
        (cluster.device.peak_w, "the power of a device is not known: its joules are left out"),
        (cluster.node.host_w, "the power of a host is not known: its joules are left out"),
        (cluster.node.network_w, "the power of the network is not known: its joules are left out"),
        (cluster.site.pue, "no PUE is known: the joules are those without cooling"),
    )
    left_out = tuple(text for known, text in parts if not known)
    return (*left_out, ASSUMED) if cluster.device.peak_w else left_out
