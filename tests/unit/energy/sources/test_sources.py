"""`hpcdist energy sources`: missing sources are listed with a reason, and are no failure."""

import os
import shutil
import tempfile
from pathlib import Path

import click.testing
import pytest

from hpcdist.cli.energy import command
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.sources.discovery import GpuClaim, open_node_sources, survey


def test_machine_without_sources_lists_reasons(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    done = click.testing.CliRunner().invoke(command, ["sources", "--powercap", str(tmp_path / "nowhere")])
    assert done.exit_code == 0, done.output
    lines = {line.split()[0]: line for line in done.output.splitlines()}
    assert f"not measured: {tmp_path / 'nowhere'} does not exist" in lines["cpu"] and "dram" in lines


def test_readable_package_is_listed(tmp_path):
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    (zone / "name").write_text("package-0\n")
    (zone / "energy_uj").write_text("5\n")
    output = click.testing.CliRunner().invoke(command, ["sources", "--powercap", str(tmp_path)]).output
    assert ["cpu", "package-0", "readable"] in [line.split() for line in output.splitlines()]


def test_permission_reason_names_the_chmod_command():
    root = Path(tempfile.mkdtemp(prefix="powercap-"))  # other users may enter it, unlike pytest's tmp_path
    try:
        root.chmod(0o755)
        zone = root / "intel-rapl:0"
        zone.mkdir(mode=0o755)
        (zone / "name").write_text("package-0\n")
        (zone / "energy_uj").write_text("5\n")
        (zone / "energy_uj").chmod(0)
        before = os.geteuid()
        if before == 0:
            os.seteuid(65534)  # root ignores mode bits
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


def test_cray_counters_are_listed(tmp_path):
    for name, value in {"energy": "5 J", "power": "3 W", "accel0_energy": "1 J", "freshness": "1"}.items():
        (tmp_path / name).write_text(value)
    arguments = ["sources", "--pm-counters", str(tmp_path), "--powercap", str(tmp_path / "none")]
    output = click.testing.CliRunner().invoke(command, arguments).output
    lines = [line.split() for line in output.splitlines()]
    assert ["node", "pm_counters/energy", "readable"] in lines
    assert ["gpu", "pm_counters/accel0_energy", "readable"] in lines


def test_cpu_only_setting_does_not_need_gpus():
    result = open_node_sources(
        EnergyConfig(sources="rapl", powercap="/nowhere", utilisation_s=0.0), [GpuClaim(("GPU-0",))], True
    )
    assert result.needed == set() and result.missing["gpu"] == "energy.sources = 'rapl'"
    assert open_node_sources(
        EnergyConfig(powercap="/nowhere", utilisation_s=0.0), [GpuClaim(reason="no")], True
    ).needed == {"gpu"}


@pytest.mark.parametrize("name", ["sources", "watch", "report"])
def test_every_command_has_help(name):
    done = click.testing.CliRunner().invoke(command, [name, "--help"])
    assert done.exit_code == 0 and "Usage:" in done.output, done.output
