"""The modulefiles under Environment Modules and under Lmod: an unload removes everything that a load added."""

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import hpcdist
from harness import jobs
from hpcdist.batch import job, modulefile

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
    """Return the command of each module system, or None if the system is not installed."""
    lmod = [os.environ.get("LMOD_CMD", ""), *LMOD]
    candidates = [os.environ.get("MODULES_CMD"), "/usr/lib/x86_64-linux-gnu/modulecmd.tcl", shutil.which("modulecmd")]
    return {
        "environment-modules": next((path for path in candidates if path and os.path.exists(path)), None),
        "lmod": next((path for path in lmod if os.path.exists(path)), None),
    }


@dataclass
class Shell:
    """A bash with one of the module systems, which writes its environment into ``folder``."""

    tool: str
    program: str
    folder: Path

    @property
    def is_lmod(self):
        return self.tool.startswith("lmod")

    @property
    def hostile(self):
        """A value with special characters. Lmod reads a Tcl file as Latin-1."""
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

    def run_checked(self, script, modulefiles, *arguments, **environment):
        done = self.run(script, modulefiles, *arguments, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def environment(self, name):
        lines = (self.folder / name).read_text().split("\0")
        return dict(line.split("=", 1) for line in lines if line and not line.startswith((*_THEIRS, "BASH_FUNC_")))

    def changes(self, name):
        """Return the differences between the environments ``before`` and ``name``."""
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


def install_modulefiles(modulefiles):
    """Copy the modulefiles, and the file that names the package, to their place in an installation."""
    shutil.copytree(job.folder(job.MODULEFILES), modulefiles)
    home = modulefiles.parents[2] if modulefiles.parent.name == "batch" else modulefiles.parent
    install_package(home)
    return modulefiles


def install_package(home, version=hpcdist.__version__):
    (home / "hpcdist").mkdir(parents=True, exist_ok=True)
    (home / "hpcdist" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    shutil.copytree(ALONE, home / "hpcdist" / "libexec", dirs_exist_ok=True)


def write_command(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nPYTHONPATH={CLONE} exec {sys.executable} -P -m hpcdist "$@"\n')
    path.chmod(0o755)


def test_module_of_a_clone_with_its_environment_sets_root_and_path(shell, tmp_path):
    clone = tmp_path / "clone"
    modulefiles = install_modulefiles(clone / "modulefiles")
    write_command(clone / ".venv" / "bin" / "hpcdist")
    shell.run_checked(LOAD, modulefiles, NAME)
    assert shell.changes("loaded") == {"HPCDIST_ROOT": str(clone), "PATH": f"{clone}/hpcdist/libexec:/usr/bin:/bin"}
    shell.assert_nothing_is_left()
    words = (shell.folder / "words").read_text()
    assert f"hpcdist {hpcdist.__version__}: MPI-native distributed training." in words, "help"
    assert "Description: MPI-native distributed training" in words, "whatis"
    assert f"Version: {hpcdist.__version__}" in words and "Load the MPI" in words


def test_module_of_a_clone_that_is_not_installed_sets_pythonpath(shell, tmp_path):
    clone = tmp_path / "clone"
    shell.run_checked(LOAD, install_modulefiles(clone / "modulefiles"), NAME, PYTHONPATH="/mine")
    assert shell.changes("loaded") == {"HPCDIST_ROOT": str(clone), "PYTHONPATH": f"{clone}:/mine"}
    shell.assert_nothing_is_left()


def test_unload_restores_the_previous_values(shell, tmp_path):
    if shell.tool == "lmod without lua":
        pytest.skip("Lmod itself gives back the new value of a pushenv in a Tcl file")
    clone = tmp_path / "clone"
    write_command(clone / ".venv" / "bin" / "hpcdist")
    mine = {"HPCDIST_ROOT": "/mine", "PATH": f"{clone}/hpcdist/libexec:/usr/bin:/bin"}
    shell.run_checked(LOAD, install_modulefiles(clone / "modulefiles"), NAME, **mine)
    assert shell.changes("loaded")["HPCDIST_ROOT"] == str(clone)
    assert shell.changes("after") == {}


def test_module_of_a_target_installation_sets_path_and_pythonpath(shell, tmp_path):
    target = tmp_path / "target"
    modulefiles = install_modulefiles(target / "hpcdist" / "batch" / "modulefiles")
    write_command(target / "bin" / "hpcdist")
    shell.run_checked(LOAD, modulefiles, NAME)
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


def test_module_of_an_installed_package_adds_command_and_completion(shell, tmp_path):
    site = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    modulefiles = install_modulefiles(site / "hpcdist" / "batch" / "modulefiles")
    write_command(tmp_path / "env" / "bin" / "hpcdist")
    registered = "complete -F _hpcdist_completion hpcdist"
    output = shell.run_checked(COMPLETE, modulefiles, NAME).splitlines()
    assert output == [
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
def test_module_does_not_hide_commands_of_the_same_name(shell, tmp_path, whole):
    """A site has its own python3 and mpirun next to the environment of hpcdist, which also has them."""
    ours, theirs = tmp_path / "env" / "bin", tmp_path / "theirs"
    install_package(tmp_path / "env" / "lib" / "python3.12" / "site-packages")
    write_command(ours / "hpcdist")
    for folder in (ours, theirs):
        for name in ("python3", "python", "pip", "mpirun", "mpiexec"):
            folder.mkdir(exist_ok=True)
            (folder / name).write_text('#!/bin/sh\necho "not to be started: $0"\nexit 3\n')
            (folder / name).chmod(0o755)
    chosen = modulefile.Modulefile(installation=modulefile.find_installation(tmp_path / "env"), environment=whole)
    texts = {kind: modulefile.render(kind, chosen) for kind in modulefile.KINDS}
    modulefile.write(tmp_path / "modules", "1.0", texts, force=False)
    output = shell.run_checked(ALONE_ON_PATH, tmp_path / "modules", "slurm-openmpi", PATH=f"{theirs}:/usr/bin:/bin")
    before, loaded, after = ((shell.folder / name).read_text() for name in ("before", "loaded", "after"))
    assert str(theirs / "mpirun") in before.split()
    assert loaded == (before.replace(str(theirs), str(ours)) if whole else before)
    assert after == before
    assert output.startswith(f"hpcdist, version {hpcdist.__version__}\n")
    assert output.count(f"run by {sys.executable}") == 2
    assert str(Path(sys.executable).parent / "mpirun") in output and "not to be started" not in output
    assert f"hpcdist=({sys.executable} -P -m hpcdist)" in output
    assert output.endswith("code 2\n"), "the exit code is that of the command"


@pytest.fixture
def site(shell, tmp_path):
    """A folder of modules: generated modulefiles of two versions, and an MPI."""
    modulefiles = tmp_path / "modules"
    for version in ("1.0", "2.0"):
        prefix = tmp_path / ("plain" if version == "1.0" else SECOND)
        install_package(prefix / "lib" / "python3.12" / "site-packages", version)
        write_command(prefix / "bin" / "hpcdist")
        result = modulefile.find_installation(prefix)
        chosen = modulefile.Modulefile(
            installation=result,
            mpi="mympi/5.0",
            depends_on=("tool",),
            variables={"HPCDIST_SITE": f"site {version}", "MINE": shell.hostile},
        )
        texts = {kind: modulefile.render(kind, chosen) for kind in modulefile.KINDS}
        modulefile.write(modulefiles, result.version, texts, force=False)
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


def test_generated_module_loads_its_dependencies_and_can_be_swapped(shell, site, tmp_path):
    shell.run_checked(SWAP, site)
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


def test_loading_a_second_hpcdist_module_is_rejected(shell, site):
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


def test_plain_sh_can_load_the_module(shell, tmp_path):
    """sh has no completion, and must not see any bash syntax: it would end the start-up files."""
    clone = tmp_path / "clone"
    load = """said=$("$MODULE_COMMAND" sh load "$0"); eval "$said"; echo "$HPCDIST_ROOT" """
    output = shell.run_checked(f"sh -euc '{load}' \"$1\"", install_modulefiles(clone / "modulefiles"), NAME)
    assert output == f"{clone}\n"


def test_load_fails_if_a_dependency_is_missing(shell, site):
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
def test_load_names_the_missing_files(shell, site, tmp_path, missing):
    gone = tmp_path / "plain" / missing
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    done = shell.run(GONE, site)
    assert done.returncode == 0, done.stdout + done.stderr
    output = " ".join(done.stderr.split())
    assert str(gone) in output.replace(" ", "") and "hpcdist site modulefile --prefix DIR" in output
    assert not {"HPCDIST_ROOT", "PATH"} & shell.changes("refused").keys()


def test_unload_works_after_the_installation_was_removed(shell, site, tmp_path):
    script = f"state before; module load hpcdist/1.0 || exit; rm -r {tmp_path}/plain; module unload hpcdist || exit"
    shell.run_checked(f"{script}; module unload tool mympi || exit; state after", site)
    shell.assert_nothing_is_left()


def test_shipped_modulefile_copied_elsewhere_reports_it(shell, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(job.folder(job.MODULEFILES), elsewhere)
    done = shell.run("module load hpcdist", elsewhere)
    assert done.returncode != 0 and "looks nowhere else" in " ".join(done.stderr.split())


def test_only_modules_are_listed_as_available(shell, tmp_path):
    """The folder also holds the description, the templates and a README."""
    modulefiles = install_modulefiles(tmp_path / "clone" / "modulefiles")
    listed = shell.run("module -t avail", modulefiles)
    output = (listed.stdout + listed.stderr).splitlines()
    assert [line for line in output if line and not line.endswith(":")] in ([NAME], ["hpcdist/", NAME])
    if shell.is_lmod:
        spider = shell.run("module spider hpcdist", modulefiles)
        assert "MPI-native distributed training" in spider.stdout + spider.stderr
        assert "Other possible modules matches" not in spider.stdout + spider.stderr
