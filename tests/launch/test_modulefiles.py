"""The modulefiles, read by Environment Modules and by Lmod themselves: what a load adds, an unload takes away."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hpcdist
from hpcdist.batch import resources

NAME = f"hpcdist/{hpcdist.__version__}"
# What the module systems keep for themselves.
_THEIRS = ("LOADEDMODULES", "_LMFILES_", "__MODULES", "_ModuleTable", "__LMOD", "LMOD_", "MODULE", "_=", "SHLVL")
LMOD = ("/usr/share/lmod/lmod/libexec/lmod", "/opt/apps/lmod/lmod/libexec/lmod")

SESSION = """
set -eu
module() { local said; said=$("$MODULE_COMMAND" bash "$@"); eval "$said"; }
env -0 > before
module load "$1"
env -0 > loaded
{ module help "$1"; module whatis "$1"; } > words 2>&1
module unload "$1"
env -0 > after
"""


def tools() -> dict[str, str | None]:
    """The command of each module system; None where it is not installed."""
    lmod = [os.environ.get("LMOD_CMD", ""), *LMOD]
    candidates = [os.environ.get("MODULES_CMD"), "/usr/lib/x86_64-linux-gnu/modulecmd.tcl", shutil.which("modulecmd")]
    return {
        "environment-modules": next((path for path in candidates if path and os.path.exists(path)), None),
        "lmod": next((path for path in lmod if os.path.exists(path)), None),
    }


@pytest.fixture(params=["environment-modules", "lmod", "lmod without lua"])
def session(request, tmp_path):
    """``session(modulefiles, **environment)`` loads and unloads, and returns the three environments and the words."""
    tool = request.param.split()[0]
    program = tools()[tool]
    if program is None:
        pytest.skip(f"{tool} is not installed (apt-get install {tool})")

    def start(modulefiles: Path, **environment: str):
        if request.param.endswith("without lua"):  # so that Lmod reads the Tcl file
            for path in (modulefiles / "hpcdist").glob("*.lua"):
                path.unlink()
        settings = {"MODULE_COMMAND": program, "MODULEPATH": str(modulefiles), "HOME": str(tmp_path)}
        done = subprocess.run(
            ["bash", "-c", SESSION, "bash", NAME],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin"} | settings | environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = [environment_in(tmp_path / name) for name in ("before", "loaded", "after")]
        return *found, (tmp_path / "words").read_text()

    return start


def environment_in(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().split("\0") if line and not line.startswith(_THEIRS)]
    return dict(line.split("=", 1) for line in lines)


def changes(before: dict[str, str], after: dict[str, str]) -> dict[str, str | None]:
    names = before.keys() | after.keys()
    return {name: after.get(name) for name in names if before.get(name) != after.get(name)}


def lay(modulefiles: Path) -> Path:
    """Copy the modulefiles to where an installation has them."""
    shutil.copytree(resources.folder(resources.MODULEFILES), modulefiles)
    return modulefiles


def command(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m hpcdist "$@"\n')
    path.chmod(0o755)


def test_a_clone_with_its_environment(session, tmp_path):
    clone = tmp_path / "clone"
    modulefiles = lay(clone / "modulefiles")
    command(clone / ".venv" / "bin" / "hpcdist")
    before, loaded, after, words = session(modulefiles)
    assert changes(before, loaded) == {"HPCDIST_ROOT": str(clone), "PATH": f"{clone}/.venv/bin:/usr/bin:/bin"}
    assert changes(before, after) == {}
    assert words.count(f"hpcdist {hpcdist.__version__}: MPI-native distributed training") == 2, "help and whatis"


def test_a_clone_that_is_not_installed_is_told_to_python(session, tmp_path):
    clone = tmp_path / "clone"
    before, loaded, after, _ = session(lay(clone / "modulefiles"), PYTHONPATH="/mine")
    assert changes(before, loaded) == {"HPCDIST_ROOT": str(clone), "PYTHONPATH": f"{clone}:/mine"}
    assert changes(before, after) == {}


def test_an_installed_package_brings_its_command(session, tmp_path):
    site = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    modulefiles = lay(site / "hpcdist" / "batch" / "modulefiles")
    command(tmp_path / "env" / "bin" / "hpcdist")
    before, loaded, after, _ = session(modulefiles)
    assert changes(before, loaded) == {"HPCDIST_ROOT": str(site), "PATH": f"{tmp_path}/env/bin:/usr/bin:/bin"}
    assert changes(before, after) == {}
    clone = str(Path(hpcdist.__file__).parents[1])
    shown = subprocess.run(
        ["hpcdist", "--version"],
        env=loaded | {"PYTHONPATH": clone},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert shown.stdout == f"hpcdist, version {hpcdist.__version__}\n"


def test_a_package_installed_with_target_needs_both(session, tmp_path):
    target = tmp_path / "target"
    modulefiles = lay(target / "hpcdist" / "batch" / "modulefiles")
    command(target / "bin" / "hpcdist")
    before, loaded, after, _ = session(modulefiles)
    assert changes(before, loaded) == {
        "HPCDIST_ROOT": str(target),
        "PATH": f"{target}/bin:/usr/bin:/bin",
        "PYTHONPATH": str(target),
    }
    assert changes(before, after) == {}
