"""What only a list can say, and a list forgets: the version in the names of the modulefiles, the packages."""

import configparser
from pathlib import Path

import pytest

import hpcdist
from hpcdist.batch import job

CLONE = Path(hpcdist.__file__).resolve().parents[1]


def test_the_modulefiles_carry_the_version():
    names = {path.name for path in (job.folder(job.MODULEFILES) / "hpcdist").iterdir()}
    assert names == {hpcdist.__version__, f"{hpcdist.__version__}.lua"}, "rename both with every version"


def test_setup_cfg_lists_every_package():
    settings = configparser.ConfigParser()
    if not settings.read(CLONE / "setup.cfg"):
        pytest.skip("hpcdist is installed, there is no setup.cfg beside it")
    listed = settings["options"]["packages"].split()
    mapped = dict(line.split(" = ") for line in settings["options"]["package_dir"].strip().splitlines())
    folders = {".".join(path.parent.relative_to(CLONE).parts) for path in (CLONE / "hpcdist").rglob("__init__.py")}
    assert sorted(listed) == sorted(folders | set(mapped)), "add the package to setup.cfg, or it is not installed"
    assert all((CLONE / folder).is_dir() for folder in mapped.values())
