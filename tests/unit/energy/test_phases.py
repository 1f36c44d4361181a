"""Energy of the phases of a program: settings from the environment, the declared model, and phases of other ranks."""

import math
import os
import time
from types import SimpleNamespace

import pytest

from hpcdist.comm.mpi.world import World
from hpcdist.comm.threads.communicator import solo
from hpcdist.energy import phases
from hpcdist.energy.report import DECLARED, NodeContribution, SourceResult, merge
from hpcdist.errors import ConfigurationError


@pytest.fixture
def program(monkeypatch):
    """A program of one rank that has not opened any sensor."""
    world = World(SimpleNamespace(comm=solo()))
    monkeypatch.setattr(phases, "communicator_of", lambda comm: world.comm)
    monkeypatch.setattr(phases, "_monitors", [])
    monkeypatch.setattr(phases, "_entered", {})
    for name in list(os.environ):
        if name.startswith(phases.VARIABLES):
            monkeypatch.delenv(name)
    yield world
    for monitor in phases._monitors:
        monitor.stop()


def test_variables_set_the_declared_model_of_a_script(program, monkeypatch):
    monkeypatch.setenv("HPCDIST_SET__ENERGY__SOURCES", "declared")
    monkeypatch.setenv("HPCDIST_SET__ENERGY__CPU_TDP_W", "100")
    monkeypatch.setenv("HPCDIST_SET__ENERGY__IDLE_FRACTION", "1.0")
    phases.configure(sources="none", utilisation_s=0.0)
    with phases.window("short"):
        time.sleep(0.02)  # shorter than two updates of any sensor
    usage = phases.usage()
    short = usage["phases"]["short"]
    assert usage["label"] == DECLARED and short["reason"] is None and short["seconds"] > 0
    assert 0 < short["joules"] == usage["energy_j"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("CPU_WATTS", "1", "a key of"), ("CPU_TDP_W", "many", "a number"), ("SHIFT", "2", "true or false")],
)
def test_invalid_variable_is_named(program, monkeypatch, name, value, message):
    monkeypatch.setenv(f"HPCDIST_SET__ENERGY__{name}", value)
    with pytest.raises(ConfigurationError, match=f"HPCDIST_SET__ENERGY__{name}=.*expected {message}"):
        phases.configure()


def test_phase_of_another_rank_is_unknown(monkeypatch):
    first = {"energy_j": 1.0, "phases": {"training": {"joules": 1.0}}}
    comm = SimpleNamespace(allgather_object=lambda names: [["training"], ["training", "io"]])
    monkeypatch.setattr(phases, "_monitors", [SimpleNamespace(report=lambda: dict(first), comm=comm)])
    result = phases.usage()["phases"]
    assert result["training"]["joules"] == 1.0
    assert math.isnan(result["io"]["joules"]) and "rank 1, have windows of io" in result["io"]["reason"]


def test_short_window_of_declared_source_has_joules():
    sources = [SourceResult("declared", "cpu", 0.1, declared=True), SourceResult("sensor", "gpu", 0.1)]
    phase = {"seconds": 0.01, "windows": 1, "shortest_s": 0.01, "mj": [1000.0, 0.0]}
    node = NodeContribution(0, sources, {"short": phase}, [1000.0, 0.0])
    alone = NodeContribution(0, sources[:1], {"short": phase | {"mj": [1000.0]}}, [1000.0])
    assert merge([alone])["phases"]["short"]["joules"] == 1.0
    report = merge([node])
    assert math.isnan(report["phases"]["short"]["joules"]) and "shorter than 2 updates" in report["reason"]
