"""The sources of a machine as a person reads them: what is missing is said, and it is no failure."""

import click.testing

from hpcdist.cli.energy import command


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
