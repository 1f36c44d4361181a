"""Lists that must be complete: the version in the names of the modulefiles, and the packages in setup.cfg."""

import configparser
from pathlib import Path

import pytest
from click.testing import CliRunner

import hpcdist
from hpcdist.batch import job
from hpcdist.cli import site
from hpcdist.errors import UsageError

CLONE = Path(hpcdist.__file__).resolve().parents[1]


def test_modulefile_names_contain_the_version():
    names = {path.name for path in (job.folder(job.MODULEFILES) / "hpcdist").iterdir()}
    assert names == {hpcdist.__version__, f"{hpcdist.__version__}.lua"}, "rename both files with every version"


def test_setup_cfg_lists_every_package():
    settings = configparser.ConfigParser()
    if not settings.read(CLONE / "setup.cfg"):
        pytest.skip("hpcdist is installed, setup.cfg is only in a clone")
    listed = settings["options"]["packages"].split()
    mapped = dict(line.split(" = ") for line in settings["options"]["package_dir"].strip().splitlines())
    folders = {".".join(path.parent.relative_to(CLONE).parts) for path in (CLONE / "hpcdist").rglob("__init__.py")}
    assert sorted(listed) == sorted(folders | set(mapped)), "add the package to setup.cfg, or it is not installed"
    assert all((CLONE / folder).is_dir() for folder in mapped.values())


def test_site_monitoring_writes_the_shipped_files_and_keeps_changed_ones(tmp_path):
    shipped = {path.name: path.read_text() for path in job.folder("monitoring").iterdir()}
    run, arguments = CliRunner(), ["monitoring", "--output", str(tmp_path / "new" / "folder")]
    done = run.invoke(site.command, arguments)
    assert done.exit_code == 0 and sorted(Path(line).name for line in done.output.splitlines()) == sorted(shipped)
    assert {path.name: path.read_text() for path in (tmp_path / "new" / "folder").iterdir()} == shipped
    changed = tmp_path / "new" / "folder" / "alerts.yml"
    changed.write_text("groups: []\n")
    refused = run.invoke(site.command, arguments)
    assert isinstance(refused.exception, UsageError) and "different content: " in str(refused.exception)
    assert changed.read_text() == "groups: []\n"
    assert run.invoke(site.command, [*arguments, "--force"]).exit_code == 0
    assert changed.read_text() == shipped["alerts.yml"]
