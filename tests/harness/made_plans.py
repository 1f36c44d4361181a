"""A made-up plan with round numbers, for tests of its output: a model, a cluster and an estimate."""

from typing import Any

from hpcdist.planner import checks
from hpcdist.planner.cluster.hardware import (
    Cluster,
    ClusterNode,
    ClusterSite,
    ClusterStorage,
    Device,
    EfficiencyCurve,
    FailureRates,
    LinkLevel,
)
from hpcdist.planner.estimate import FlopEstimate, MemoryEstimate, PlanEstimate, RunEstimate, StepEnergy, TimeEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.memory.device import memory
from hpcdist.planner.model.description import ModelDescription, ModelUnit

GB = 1e9


def problems(description: ModelDescription, layout: ParallelLayout, cluster: Cluster, batch: int) -> tuple[str, ...]:
    """Return the reasons why a layout is impossible: one text for each violated limit."""
    broken = [*checks.shape_problems(description, layout, cluster, batch)]
    if not broken and (full := checks.memory_problem(memory(description, layout, cluster, batch))):
        broken.append(full)
    return tuple(problem.text for problem in broken)


def cluster_of(device: Device, *levels: LinkLevel, **keys: Any) -> Cluster:
    """Return a cluster of nodes with 8 devices, a slow file system and rare failures."""
    made = {"name": "test", "about": "", "devices": 1 << 17, "node": ClusterNode(devices=8)}
    names = ("write_bytes_per_s", "read_bytes_per_s", "node_write_bytes_per_s", "node_read_bytes_per_s")
    made |= {"storage": ClusterStorage(**dict.fromkeys(names, 1e9))}
    made |= {"failures": FailureRates(node_mtbf_s=1e6, restart_s=60.0)}
    return Cluster(**{**made, "device": device, "levels": levels, **keys})


CLUSTER = Cluster(
    name="boxes",
    about="made up",
    devices=1024,
    device=Device(
        name="card",
        peak_flops={"bfloat16": 300e12},
        matmul={"bfloat16": EfficiencyCurve(sizes=(64.0, 4096.0), shares=(0.1, 0.8))},
        memory_bytes=80 * 2.0**30,
        memory_bytes_per_s=2e12,
        idle_w=60.0,
        peak_w=400.0,
    ),
    node=ClusterNode(devices=8, host_w=1000.0),
    levels=(
        LinkLevel(name="inside", devices=8, latency_s=2e-6, bytes_per_s=300e9),
        LinkLevel(name="between", devices=0, latency_s=5e-6, bytes_per_s=25e9),
    ),
    storage=ClusterStorage(
        write_bytes_per_s=1e11, read_bytes_per_s=1e11, node_write_bytes_per_s=5e9, node_read_bytes_per_s=5e9
    ),
    failures=FailureRates(node_mtbf_s=3e7, restart_s=300.0),
    site=ClusterSite(
        pue=1.1, carbon_g_per_kwh=400.0, carbon_source="assumption", device_hour_price=2.0, currency="EUR"
    ),
)

DESCRIPTION = ModelDescription(
    name="model", units=(ModelUnit(name="block", count=10, parameters=100_000_000),), tokens=1000, width=64
)

LAYOUT = ParallelLayout(data=4, pipeline=2, tensor=8, schedule="1f1b", recompute="selective", sequence_parallel=True)

MEMORY = MemoryEstimate(
    terms={
        "parameters": 5 * GB,
        "gradients": 10 * GB,
        "optimizer": 30 * GB,
        "activations": 20 * GB,
        "messages": 1 * GB,
        "scratch": 0.0,
        "reserved": 2 * GB,
    },
    limit_bytes=80 * 2.0**30,
    rule="18 bytes a parameter: 2 + 4 + 12",
    stage=1,
)

TIMING = TimeEstimate(
    terms={"forward": 2.0, "backward": 4.0, "recompute": 0.0, "tensor": 1.0, "bubble": 2.0, "data": 0.5, "update": 0.5},
    hidden_s=0.25,
    bubble=0.2,
    bytes={"tensor": 12 * GB, "data": 3 * GB, "pipeline": 0.0},
    algorithms={"tensor": "ring", "data": "hierarchical"},
)

RUN = RunEstimate(
    steps=10_000,
    work_s=100_000.0,
    wall_s=110_000.0,
    mtbf_s=36_000.0,
    failures=3.0,
    save_s=40.0,
    interval_s=1800.0,
    slowdown=1.1,
    joules=3.6e9,
    carbon_g=4e5,
    price=3911.11,
    currency="EUR",
)

ESTIMATE = PlanEstimate(
    layout=LAYOUT,
    global_batch=512,
    tokens=512_000,
    parameters=DESCRIPTION.parameters,
    memory=MEMORY,
    timing=TIMING,
    work=FlopEstimate(
        model_flops=64 * 1e15, hardware_flops=64 * 1.2e15, exact_flops=64 * 0.9e15, executed_flops=64 * 1.1e15
    ),
    energy=StepEnergy(terms={"devices": 250e3, "hosts": 80e3, "network": 0.0, "cooling": 30e3}, device_w=390.0),
    run=RUN,
    peak_flops=64 * 300e12,
    flags=("the curve is an assumption",),
)
