"""The modulefiles, read by Environment Modules and by Lmod themselves: what a load adds, an unload takes away."""

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import hpcdist
from harness import jobs
from hpcdist.batch import job
from hpcdist.batch.packaging import modulefile

pytestmark = pytest.mark.full

NAME = f"hpcdist/{hpcdist.__version__}"
CLONE = Path(hpcdist.__file__).parents[1]
ALONE = CLONE / "hpcdist" / "libexec"
# What the module systems keep for themselves.
_THEIRS = ("LOADEDMODULES", "_LMFILES_", "__MODULES", "_ModuleTable", "__LMOD", "LMOD_", "MODULE", "_=", "SHLVL")
LMOD = ("/usr/share/lmod/lmod/libexec/lmod", "/opt/apps/lmod/lmod/libexec/lmod")
# Every language that a value passes through has something here to stumble over.
HOSTILE = """a"b\\n\\c $(touch pwned) `touch pwned` ${HOME} $PATH [exit 3] {x ; 'q' #% ]] ]===] %s"""
SECOND = "it's $HOME [exit] {; # *"  # a folder with what a path may have

PRELUDE = """
set -u
module() { local said code=0; said=$("$MODULE_COMMAND" bash "$@") || code=$?; eval "$said" && return "$code"; }
state() { env -0 >"$1"; { alias; declare -F; complete -p; } >"$1.shell"; }
"""
LOAD = """
state before; module load "$1" || exit; state loaded
{ module help "$1"; module whatis "$1"; } >words 2>&1
module unload "$1" || exit; state after
"""


def tools():
    """The command of each module system; None where it is not installed."""
    lmod = [os.environ.get("LMOD_CMD", ""), *LMOD]
    candidates = [os.environ.get("MODULES_CMD"), "/usr/lib/x86_64-linux-gnu/modulecmd.tcl", shutil.which("modulecmd")]
    return {
        "environment-modules": next((path for path in candidates if path and os.path.exists(path)), None),
        "lmod": next((path for path in lmod if os.path.exists(path)), None),
    }


@dataclass
class Shell:
    """A bash with one of the module systems, whose states it leaves in ``folder``."""

    tool: str
    program: str
    folder: Path

    @property
    def is_lmod(self):
        return self.tool.startswith("lmod")

    @property
    def hostile(self):
        """A value; Lmod reads a Tcl file as Latin-1."""
        return HOSTILE if self.tool.endswith("without lua") else HOSTILE + " é €"

    def run(self, script, modulefiles, *arguments, **environment):
        if self.tool.endswith("without lua"):  # so that Lmod reads the Tcl file
            for path in modulefiles.glob("*/*.lua"):
                path.unlink()
        settings = {"MODULE_COMMAND": self.program, "MODULEPATH": str(modulefiles), "HOME": str(self.folder)}
        return jobs.run(
            ["bash", "-c", PRELUDE + script, "bash", *arguments],
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"} | settings | environment,
            cwd=self.folder,
        )

    def does(self, script, modulefiles, *arguments, **environment):
        done = self.run(script, modulefiles, *arguments, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def environment(self, name):
        lines = (self.folder / name).read_text().split("\0")
        return dict(line.split("=", 1) for line in lines if line and not line.startswith((*_THEIRS, "BASH_FUNC_")))

    def changes(self, name):
        """What differs between the states ``before`` and ``name``."""
        before, after = self.environment("before"), self.environment(name)
        names = before.keys() | after.keys()
        return {name: after.get(name) for name in names if before.get(name) != after.get(name)}

    def assert_nothing_is_left(self):
        assert self.changes("after") == {}
        before, after = ((self.folder / f"{name}.shell").read_text() for name in ("before", "after"))
        assert after == before, "aliases, functions or completions differ"
        left = (self.folder / "after").read_text()
        assert not [name for name in ("BASH_FUNC__hpcdist", "PUSHENV_", "__LMOD_STACK_") if name in left]


@pytest.fixture(params=["environment-modules", "lmod", "lmod without lua"])
def shell(request, tmp_path):
    tool = request.param.split()[0]
    program = tools()[tool]
    if program is None:
        pytest.skip(f"{tool} is not installed (apt-get install {tool})")
    folder = tmp_path / "shell"
    folder.mkdir()
    return Shell(request.param, program, folder)


def lay(modulefiles):
    """Copy the modulefiles, and the file that tells the package, to where an installation has them."""
    shutil.copytree(job.folder(job.MODULEFILES), modulefiles)
    home = modulefiles.parents[2] if modulefiles.parent.name == "batch" else modulefiles.parent
    package(home)
    return modulefiles


def package(home, version=hpcdist.__version__):
    (home / "hpcdist").mkdir(parents=True, exist_ok=True)
    (home / "hpcdist" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    shutil.copytree(ALONE, home / "hpcdist" / "libexec", dirs_exist_ok=True)


def command(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nPYTHONPATH={CLONE} exec {sys.executable} -P -m hpcdist "$@"\n')
    path.chmod(0o755)


def test_a_clone_with_its_environment(shell, tmp_path):
    clone = tmp_path / "clone"
    modulefiles = lay(clone / "modulefiles")
    command(clone / ".venv" / "bin" / "hpcdist")
    shell.does(LOAD, modulefiles, NAME)
    assert shell.changes("loaded") == {"HPCDIST_ROOT": str(clone), "PATH": f"{clone}/hpcdist/libexec:/usr/bin:/bin"}
    shell.assert_nothing_is_left()
    words = (shell.folder / "words").read_text()
    assert f"hpcdist {hpcdist.__version__}: MPI-native distributed training." in words, "help"
    assert "Description: MPI-native distributed training" in words, "whatis"
    assert f"Version: {hpcdist.__version__}" in words and "Load the MPI" in words


def test_a_clone_that_is_not_installed_is_told_to_python(shell, tmp_path):
    clone = tmp_path / "clone"
    shell.does(LOAD, lay(clone / "modulefiles"), NAME, PYTHONPATH="/mine")
    assert shell.changes("loaded") == {"HPCDIST_ROOT": str(clone), "PYTHONPATH": f"{clone}:/mine"}
    shell.assert_nothing_is_left()


def test_what_was_set_before_comes_back(shell, tmp_path):
    if shell.tool == "lmod without lua":
        pytest.skip("Lmod itself gives back the new value of a pushenv in a Tcl file")
    clone = tmp_path / "clone"
    command(clone / ".venv" / "bin" / "hpcdist")
    mine = {"HPCDIST_ROOT": "/mine", "PATH": f"{clone}/hpcdist/libexec:/usr/bin:/bin"}
    shell.does(LOAD, lay(clone / "modulefiles"), NAME, **mine)
    assert shell.changes("loaded")["HPCDIST_ROOT"] == str(clone)
    assert shell.changes("after") == {}


def test_a_package_installed_with_target_needs_both(shell, tmp_path):
    target = tmp_path / "target"
    modulefiles = lay(target / "hpcdist" / "batch" / "modulefiles")
    command(target / "bin" / "hpcdist")
    shell.does(LOAD, modulefiles, NAME)
    assert shell.changes("loaded") == {
        "HPCDIST_ROOT": str(target),
        "PATH": f"{target}/hpcdist/libexec:/usr/bin:/bin",
        "PYTHONPATH": str(target),
    }
    shell.assert_nothing_is_left()


COMPLETE = """
words() { complete -p hpcdist && COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) && _hpcdist_completion hpcdist; }
state before; module load "$1" || exit; state loaded
words hpcdist trai && printf '%s\\n' "${COMPREPLY[*]}"
words hpcdist train --resu && printf '%s\\n' "${COMPREPLY[*]}"
hpcdist --version
module unload "$1" || exit; state after
words hpcdist trai 2>/dev/null || echo none
"""


def test_an_installed_package_brings_its_command_and_completion(shell, tmp_path):
    site = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    modulefiles = lay(site / "hpcdist" / "batch" / "modulefiles")
    command(tmp_path / "env" / "bin" / "hpcdist")
    registered = "complete -F _hpcdist_completion hpcdist"
    said = shell.does(COMPLETE, modulefiles, NAME).splitlines()
    assert said == [
        *(registered, "train"),
        *(registered, "--resume"),
        f"hpcdist, version {hpcdist.__version__}",
        "none",
    ]
    assert shell.changes("loaded") == {"HPCDIST_ROOT": str(site), "PATH": f"{site}/hpcdist/libexec:/usr/bin:/bin"}
    shell.assert_nothing_is_left()


ALONE_ON_PATH = """
shown() { for name in python3 python pip mpirun mpiexec; do command -v "$name"; done; }
shown >before; module load hpcdist || exit; shown >loaded
hpcdist --version && hpcdist run -n 2 -- python -c 'import sys; print("run by", sys.executable)' || exit
hpcdist run -n 2 --dry-run train && hpcdist submit --site "$1" --nodes 2 --ranks-per-node 2 --time 30 --dry-run || exit
hpcdist no-such-command; echo "code $?"
module unload hpcdist || exit; shown >after
"""


@pytest.mark.parametrize("whole", [False, True])
def test_commands_of_the_same_name_stay_what_they_were(shell, tmp_path, whole):
    """A site's own python3 and mpirun, beside the environment of hpcdist, which has its own."""
    ours, theirs = tmp_path / "env" / "bin", tmp_path / "theirs"
    package(tmp_path / "env" / "lib" / "python3.12" / "site-packages")
    command(ours / "hpcdist")
    for folder in (ours, theirs):
        for name in ("python3", "python", "pip", "mpirun", "mpiexec"):
            folder.mkdir(exist_ok=True)
            (folder / name).write_text('#!/bin/sh\necho "not to be started: $0"\nexit 3\n')
            (folder / name).chmod(0o755)
    chosen = modulefile.Modulefile(installation=modulefile.find_installation(tmp_path / "env"), environment=whole)
    texts = {kind: modulefile.render(kind, chosen) for kind in modulefile.KINDS}
    modulefile.write(tmp_path / "modules", "1.0", texts, force=False)
    said = shell.does(ALONE_ON_PATH, tmp_path / "modules", "slurm-openmpi", PATH=f"{theirs}:/usr/bin:/bin")
    before, loaded, after = ((shell.folder / name).read_text() for name in ("before", "loaded", "after"))
    assert str(theirs / "mpirun") in before.split()
    assert loaded == (before.replace(str(theirs), str(ours)) if whole else before)
    assert after == before
    assert said.startswith(f"hpcdist, version {hpcdist.__version__}\n")
    assert said.count(f"run by {sys.executable}") == 2
    assert str(Path(sys.executable).parent / "mpirun") in said and "not to be started" not in said
    assert f"hpcdist=({sys.executable} -P -m hpcdist)" in said
    assert said.endswith("code 2\n"), "the exit code is that of the command"


@pytest.fixture
def site(shell, tmp_path):
    """A folder of modules: generated ones of two versions, and an MPI."""
    modulefiles = tmp_path / "modules"
    for version in ("1.0", "2.0"):
        prefix = tmp_path / ("plain" if version == "1.0" else SECOND)
        package(prefix / "lib" / "python3.12" / "site-packages", version)
        command(prefix / "bin" / "hpcdist")
        found = modulefile.find_installation(prefix)
        chosen = modulefile.Modulefile(
            installation=found,
            mpi="mympi/5.0",
            depends_on=("tool",),
            variables={"HPCDIST_SITE": f"site {version}", "MINE": shell.hostile},
        )
        texts = {kind: modulefile.render(kind, chosen) for kind in modulefile.KINDS}
        modulefile.write(modulefiles, found.version, texts, force=False)
    for name in ("mympi/5.0", "tool/1"):
        (modulefiles / name).parent.mkdir()
        (modulefiles / name).write_text(f"#%Module1.0\nsetenv LOADED_{name.partition('/')[0].upper()} 1\n")
    return modulefiles


SWAP = """
state before
module load hpcdist/1.0 || exit; state loaded
module swap hpcdist/1.0 hpcdist/2.0 || exit; state swapped
module unload hpcdist/2.0 || exit
module unload tool mympi || exit; state after
"""


def test_a_generated_one_brings_what_it_needs_and_can_be_swapped(shell, site, tmp_path):
    shell.does(SWAP, site)
    first, second = tmp_path / "plain", tmp_path / SECOND
    for name, version, prefix in (("loaded", "1.0", first), ("swapped", "2.0", second)):
        assert shell.changes(name) == {
            "HPCDIST_ROOT": f"{prefix}/lib/python3.12/site-packages",
            "HPCDIST_SITE": f"site {version}",
            "LOADED_MYMPI": "1",
            "LOADED_TOOL": "1",
            "MINE": shell.hostile,
            "PATH": f"{prefix}/lib/python3.12/site-packages/hpcdist/libexec:/usr/bin:/bin",
        }
    shell.assert_nothing_is_left()
    assert not (shell.folder / "pwned").exists()


REFUSED = """
module load hpcdist/1.0 || exit; state before
! module load "$1" || exit; state after
"""


def test_two_at_once_are_refused(shell, site):
    # Lmod replaces one version by another without asking, so that only another name can conflict.
    second = "hpcdist/2.0"
    if shell.is_lmod:
        second = "renamed/2.0"
        shutil.copytree(site / "hpcdist", site / "renamed")
    done = shell.run(REFUSED, site, second)
    assert done.returncode == 0, done.stdout + done.stderr
    why = "because these module(s) are loaded: hpcdist" if shell.is_lmod else "cannot be loaded due to a conflict"
    assert why in " ".join(done.stderr.split())
    assert shell.changes("after") == {}


def test_a_plain_sh_can_load_it_too(shell, tmp_path):
    """It has no completion, and no word of bash may reach it: that would end its start-up files."""
    clone = tmp_path / "clone"
    load = """said=$("$MODULE_COMMAND" sh load "$0"); eval "$said"; echo "$HPCDIST_ROOT" """
    said = shell.does(f"sh -euc '{load}' \"$1\"", lay(clone / "modulefiles"), NAME)
    assert said == f"{clone}\n"


def test_a_module_it_depends_on_has_to_exist(shell, site):
    shutil.rmtree(site / "mympi")
    done = shell.run('state before; module load "$1"; code=$?; state after; exit $code', site, "hpcdist/1.0")
    assert done.returncode != 0 and "mympi/5.0" in done.stderr
    assert shell.changes("after").keys() <= {"LOADED_TOOL"}, "a module that was loaded before the missing one may stay"


GONE = """
state before
! module load hpcdist/1.0 || exit; state refused
module show hpcdist/1.0 || exit
"""


@pytest.mark.parametrize("missing", ["lib", "bin/hpcdist", "lib/python3.12/site-packages/hpcdist/libexec"])
def test_a_load_tells_what_is_missing(shell, site, tmp_path, missing):
    gone = tmp_path / "plain" / missing
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    done = shell.run(GONE, site)
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stderr.split())
    assert str(gone) in said.replace(" ", "") and "hpcdist site modulefile --prefix DIR" in said
    assert not {"HPCDIST_ROOT", "PATH"} & shell.changes("refused").keys()


def test_an_unload_needs_no_installation(shell, site, tmp_path):
    script = f"state before; module load hpcdist/1.0 || exit; rm -r {tmp_path}/plain; module unload hpcdist || exit"
    shell.does(f"{script}; module unload tool mympi || exit; state after", site)
    shell.assert_nothing_is_left()


def test_a_shipped_one_that_was_copied_elsewhere_says_so(shell, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(job.folder(job.MODULEFILES), elsewhere)
    done = shell.run("module load hpcdist", elsewhere)
    assert done.returncode != 0 and "looks nowhere else" in " ".join(done.stderr.split())


def test_only_modules_are_listed(shell, tmp_path):
    """The folder holds the description, the templates and a README as well."""
    modulefiles = lay(tmp_path / "clone" / "modulefiles")
    listed = shell.run("module -t avail", modulefiles)
    said = (listed.stdout + listed.stderr).splitlines()
    assert [line for line in said if line and not line.endswith(":")] in ([NAME], ["hpcdist/", NAME])
    if shell.is_lmod:
        spider = shell.run("module spider hpcdist", modulefiles)
        assert "MPI-native distributed training" in spider.stdout + spider.stderr
        assert "Other possible modules matches" not in spider.stdout + spider.stderr
