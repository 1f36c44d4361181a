"""The sources of a machine as a person reads them: what is missing is said, and it is no failure."""

import os
import shutil
import tempfile
from pathlib import Path

import click.testing
import pytest

from hpcdist.cli.energy.group import command
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.sources.discovery import GpuClaim, open_node_sources, survey


def test_a_machine_with_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    done = click.testing.CliRunner().invoke(command, ["sources", "--powercap", str(tmp_path / "nowhere")])
    assert done.exit_code == 0, done.output
    lines = {line.split()[0]: line for line in done.output.splitlines()}
    assert f"not measured: {tmp_path / 'nowhere'} does not exist" in lines["cpu"] and "dram" in lines


def test_a_machine_with_one_package(tmp_path):
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    (zone / "name").write_text("package-0\n")
    (zone / "energy_uj").write_text("5\n")
    output = click.testing.CliRunner().invoke(command, ["sources", "--powercap", str(tmp_path)]).output
    assert ["cpu", "package-0", "readable"] in [line.split() for line in output.splitlines()]


def test_permission_is_told_with_the_line_that_gives_it():
    root = Path(tempfile.mkdtemp(prefix="powercap-"))  # other users may enter it, unlike pytest's own
    try:
        root.chmod(0o755)
        zone = root / "intel-rapl:0"
        zone.mkdir(mode=0o755)
        (zone / "name").write_text("package-0\n")
        (zone / "energy_uj").write_text("5\n")
        (zone / "energy_uj").chmod(0)
        before = os.geteuid()
        if before == 0:
            os.seteuid(65534)  # as root, no mode bit would refuse
        try:
            rows = survey(EnergyConfig(powercap=str(root), pm_counters=str(root / "none")), {})
        finally:
            os.seteuid(before)
    finally:
        shutil.rmtree(root)
    reason = next(row["reason"] for row in rows if row["kind"] == "cpu")
    assert reason == (
        f"package-0: {zone}/energy_uj may be read by root only; ask the site to let users read it "
        f"(chmod a+r {zone}/energy_uj)"
    )


def test_a_cray_lists_its_counters(tmp_path):
    for name, value in {"energy": "5 J", "power": "3 W", "accel0_energy": "1 J", "freshness": "1"}.items():
        (tmp_path / name).write_text(value)
    arguments = ["sources", "--pm-counters", str(tmp_path), "--powercap", str(tmp_path / "none")]
    output = click.testing.CliRunner().invoke(command, arguments).output
    lines = [line.split() for line in output.splitlines()]
    assert ["node", "pm_counters/energy", "readable"] in lines
    assert ["gpu", "pm_counters/accel0_energy", "readable"] in lines


def test_who_asks_for_processors_gets_them_though_gpus_are_used():
    found = open_node_sources(
        EnergyConfig(sources="rapl", powercap="/nowhere", utilisation_s=0.0), [GpuClaim(("GPU-0",))], True
    )
    assert found.needed == set() and found.missing["gpu"] == "energy.sources = 'rapl'"
    assert open_node_sources(
        EnergyConfig(powercap="/nowhere", utilisation_s=0.0), [GpuClaim(reason="no")], True
    ).needed == {"gpu"}


@pytest.mark.parametrize("name", ["sources", "watch", "report"])
def test_every_command_has_a_help(name):
    done = click.testing.CliRunner().invoke(command, [name, "--help"])
    assert done.exit_code == 0 and "Usage:" in done.output, done.output
