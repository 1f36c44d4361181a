"""Modulefiles: the shipped files equal the rendered ones, and a value never becomes a command."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import hpcdist
from harness import jobs
from harness.jobs import LIMIT_S
from harness.marks import cases
from hpcdist.batch import job, modulefile
from hpcdist.batch.modulefile import Modulefile
from hpcdist.cli.site import modulefile as site_modulefile
from hpcdist.errors import ConfigurationError, StorageError, UsageError

# Letters with a meaning in Lua, Tcl or a shell are drawn more often than others.
HOSTILE = st.lists(st.one_of(st.sampled_from([*"\\\"'$[]{}();#`=%\n\r\t\0\x1a ", "]]", "]=]", "é"]), st.text()))
TEXTS = st.lists(HOSTILE.map("".join), min_size=1, max_size=20)

SHELL = {"CDPATH": "/", "PATH": "/usr/bin:/bin"}
ALONE = Path(hpcdist.__file__).parent / "libexec" / "hpcdist"

# Each script writes every word in hexadecimal digits, one word per line.
LUA = """for _, word in ipairs({{{words}}}) do
print((word:gsub(".", function(byte) return ("%02x"):format(byte:byte()) end)))
end
"""
TCL = """proc say {{word}} {{ puts [binary encode hex $word] }}
if 1 {{
{words}
}}
"""


def install(prefix, inside="lib/python3.12/site-packages", version="1.2"):
    package = prefix / inside / "hpcdist"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f'"""Text."""\n\n__version__ = "{version}"\n')
    (prefix / "bin").mkdir(exist_ok=True)
    (prefix / "bin" / "hpcdist").write_text('#!/bin/sh\necho "$0" "$@"\n')
    (prefix / "bin" / "hpcdist").chmod(0o755)
    shutil.copytree(ALONE.parent, package / "libexec")
    return prefix


@pytest.mark.parametrize("there", [True, False])
def test_launcher_script_does_not_start_itself(tmp_path, there):
    """For example through a link in /usr/bin if /bin is a link to /usr/bin."""
    package = install(tmp_path / "prefix") / "lib/python3.12/site-packages/hpcdist"
    if not there:
        (tmp_path / "prefix" / "bin" / "hpcdist").unlink()
    (tmp_path / "usr" / "bin").mkdir(parents=True)
    (tmp_path / "bin").symlink_to("usr/bin")
    link = tmp_path / "usr" / "bin" / "hpcdist"
    link.symlink_to(package / "libexec" / "hpcdist")
    done = jobs.run([link, "a"])
    assert (done.returncode, done.stdout) == ((0, f"{tmp_path}/prefix/bin/hpcdist a\n") if there else (69, ""))
    assert there or "no command hpcdist in" in done.stderr


def invoke(*arguments):
    return CliRunner().invoke(site_modulefile, [str(each) for each in arguments])


def printed_words(program, script, folder):
    result = shutil.which(program)
    if result is None:
        pytest.skip(f"{program} is not installed")
    (folder / "script").write_bytes(script.encode())
    line = [result, str(folder / "script")]
    # In this locale Tcl reads each byte as one character.
    done = subprocess.run(line, env={"LC_ALL": "C"}, capture_output=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr.decode() + script
    return [bytes.fromhex(line).decode() for line in done.stdout.decode().split("\n")[:-1]]


@settings(max_examples=40, deadline=None)
@given(texts=TEXTS)
@pytest.mark.full
def test_lua_reads_quoted_text_unchanged(texts, tmp_path_factory):
    script = LUA.format(words=", ".join(map(modulefile.lua, texts)))
    assert printed_words("lua", script, tmp_path_factory.mktemp("lua")) == texts


@settings(max_examples=40, deadline=None)
@given(texts=TEXTS)
@pytest.mark.full
def test_tcl_reads_quoted_text_unchanged(texts, tmp_path_factory):
    script = TCL.format(words="\n".join(f"say {modulefile.tcl(text)}" for text in texts))
    assert printed_words("tclsh", script, tmp_path_factory.mktemp("tcl")) == texts


@pytest.mark.parametrize("kind", modulefile.KINDS)
def test_templates_quote_every_value(kind):
    values = re.findall(r"{{(.*?)}}", (job.folder(job.MODULEFILES) / f"hpcdist.{kind}.j2").read_text())
    assert len(values) >= 10
    assert [value for value in values if not value.endswith(f"| {kind} ")] in ([], [' "#%Module1.0" '])


@pytest.mark.parametrize("kind", modulefile.KINDS)
def test_shipped_modulefiles_match_rendered_ones(kind):
    name = hpcdist.__version__ + modulefile.KINDS[kind]
    shipped = job.folder(job.MODULEFILES) / "hpcdist" / name
    cure = "hpcdist site modulefile --in-place --output modulefiles --force"
    assert shipped.read_text() == modulefile.render(kind, Modulefile()), f"render them again: {cure}"


def test_bash_completion_passes_shellcheck(tmp_path):
    checker = shutil.which("shellcheck") or shutil.which("shellcheck", path=Path(sys.executable).parent)
    if checker is None:
        pytest.skip("shellcheck is not installed")
    body = modulefile.source()["completion"]["bash"]
    (tmp_path / "function").write_text(f"#!/bin/bash\ncomplete_it() {{\n{body}}}\ncomplete_it hpcdist\n")
    done = jobs.run([checker, str(tmp_path / "function")])
    assert done.returncode == 0, done.stdout


def test_every_listed_variable_is_read_by_the_code():
    root = Path(hpcdist.__file__).parent
    code = "\n".join(path.read_text() for path in root.rglob("*.py"))
    assert {name for name in modulefile.source()["variables"] if f'"{name}"' not in code} == set()


def test_prefix_selects_the_installation(tmp_path):
    prefix = install(tmp_path / "env")
    printed = invoke("--kind=lua", f"--prefix={prefix}", "--mpi=openmpi/5.0.3", "--depends-on=cuda", "--setenv=A=b=c")
    assert printed.exit_code == 0, printed.output
    lines = printed.stdout.splitlines()
    assert f'local home = "{prefix}/lib/python3.12/site-packages"' in lines
    assert f'local bin = "{prefix}/bin"' in lines
    assert [line for line in lines if "depends_on" in line] == ['depends_on("openmpi/5.0.3")', 'depends_on("cuda")']
    assert 'pushenv("A", "b=c")' in lines and "This loads its MPI: openmpi/5.0.3." in printed.stdout
    assert 'local path = pathJoin(home, "hpcdist/libexec") -- only the command: no python3, pip or mpirun' in lines
    assert 'prepend_path("PATH", path)' in lines and "PYTHONPATH" not in printed.stdout


@pytest.mark.parametrize(("kind", "line"), [("lua", "local path = bin "), ("tcl", "set path $bin ")])
def test_environment_option_adds_the_whole_environment_to_path(tmp_path, kind, line):
    prefix = install(tmp_path / "env", version="0.1.0")
    shutil.rmtree(prefix / "lib/python3.12/site-packages/hpcdist/libexec")
    with pytest.raises(ConfigurationError, match=r"libexec/hpcdist is missing .* in hpcdist 0\.1\.0; .*--environment"):
        raise invoke(f"--kind={kind}", f"--prefix={prefix}").exception
    printed = invoke(f"--kind={kind}", f"--prefix={prefix}", "--environment").stdout
    assert f"\n{line}" in printed and "libexec" not in printed


class TestTheCommandAlone:
    """hpcdist/libexec/hpcdist, the launcher script that a modulefile puts on PATH."""

    def run(self, path, code=0):
        done = jobs.run([str(path), "run", "a b"], env=SHELL)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    @pytest.mark.parametrize("inside", ["lib/python3.12/site-packages", "lib/python3/dist-packages", "."])
    def test_starts_command_of_its_installation(self, tmp_path, inside):
        prefix = install(tmp_path / "it's $HOME; #", inside)
        assert self.run(prefix / inside / "hpcdist" / "libexec" / "hpcdist").startswith(f"{prefix}/bin/hpcdist run a b")

    def test_starts_command_of_a_clone_environment(self, tmp_path):
        clone = install(tmp_path / "clone", inside=".")
        shutil.copytree(clone / "bin", clone / ".venv" / "bin")
        assert self.run(clone / "hpcdist/libexec/hpcdist") == f"{clone}/.venv/bin/hpcdist run a b\n"

    def test_link_to_the_installation_is_kept_in_the_path(self, tmp_path):
        install(tmp_path / "1.2")
        (tmp_path / "current").symlink_to("1.2")
        inside = "lib/python3.12/site-packages/hpcdist/libexec/hpcdist"
        assert self.run(tmp_path / "current" / inside) == f"{tmp_path}/current/bin/hpcdist run a b\n"

    def test_link_to_the_launcher_script_is_followed(self, tmp_path):
        prefix = install(tmp_path / "env")
        (tmp_path / "hpcdist").symlink_to(prefix / "lib/python3.12/site-packages/hpcdist/libexec/hpcdist")
        assert self.run(tmp_path / "hpcdist") == f"{prefix}/bin/hpcdist run a b\n"

    def test_error_lists_searched_folders(self, tmp_path):
        prefix = install(tmp_path / "env")
        (prefix / "bin" / "hpcdist").unlink()
        output = self.run(prefix / "lib/python3.12/site-packages/hpcdist/libexec/hpcdist", code=69)
        assert f"no command hpcdist in {prefix}/bin or " in output


def test_prints_both_kinds_with_their_file_names(tmp_path):
    printed = invoke("--prefix", install(tmp_path / "env")).stdout
    assert re.findall("^==> (.*) <==$", printed, re.MULTILINE) == ["hpcdist/1.2", "hpcdist/1.2.lua"]


def test_existing_modulefiles_are_replaced_only_with_force(tmp_path):
    prefix, modules = install(tmp_path / "env"), tmp_path / "modules"
    first = invoke("--prefix", prefix, "--output", modules)
    files = [modules / "hpcdist" / name for name in ("1.2", "1.2.lua")]
    assert first.stdout.splitlines() == [str(path) for path in files]
    assert sorted((modules / "hpcdist").iterdir()) == files, "there are other files in the folder"
    assert files[0].read_text().startswith("#%Module1.0\n")
    assert invoke("--prefix", prefix, "--output", modules).exit_code == 0, "the same content is no conflict"
    before = files[0].read_text()
    with pytest.raises(UsageError, match=r"different content: .*1\.2, .*1\.2\.lua; add --force"):
        raise invoke("--prefix", prefix, "--output", modules, "--mpi=mpich").exception
    assert files[0].read_text() == before
    assert invoke("--prefix", prefix, "--output", modules, "--mpi=mpich", "--force").exit_code == 0
    assert "mpich" in files[0].read_text() and "mpich" in files[1].read_text()


def test_unwritable_folder_raises_storage_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        raise invoke("--prefix", install(tmp_path / "env"), "--output", tmp_path / "file" / "below").exception


@cases(
    "arguments, message",
    (["--setenv=HPCDIST_STIE=x"], "does not read a variable HPCDIST_STIE; the nearest known is 'HPCDIST_SITE'"),
    (["--setenv=HPCDIST_XXXXXXXX=x"], "known are: HPCDIST_SITE, "),
    (["--setenv=A"], "--setenv A: expected NAME=VALUE"),
    (["--setenv=A-B=1"], "'A-B' is not a variable name"),
    (["--setenv=A=1", "--setenv=A=2"], "A is given twice, with '1' and '2'"),
    (["--setenv=A=1\n2"], "control character"),
    (["--setenv=PATH=/x"], "PATH is set by the modulefile"),
    (["--setenv=HPCDIST_ROOT=/x"], "HPCDIST_ROOT is set by the modulefile"),
    (["--mpi=a b"], "'a b' is not a valid module name"),
    (["--depends-on=-x"], "'-x' is not a valid module name"),
    (["--depends-on=[exit]"], "is not a valid module"),
    (["--in-place", "--prefix=/"], "choose one"),
    (["--force"], "--output DIR"),
)
def test_values_that_module_systems_reject_are_rejected(arguments, message, tmp_path):
    with pytest.raises(UsageError) as refused:
        raise invoke("--in-place", *arguments).exception
    assert message in str(refused.value)


def test_setenv_accepts_recipe_keys():
    assert (
        'pushenv("HPCDIST_SET__RUN__STEPS", "5")'
        in invoke("--in-place", "--kind=lua", "--setenv=HPCDIST_SET__RUN__STEPS=5").stdout
    )


class TestFind:
    def test_finds_an_environment(self, tmp_path):
        prefix = install(tmp_path / "env")
        (prefix / "lib64").symlink_to("lib")
        result = modulefile.find_installation(prefix)
        assert (result.home, result.bin) == (prefix / "lib/python3.12/site-packages", prefix / "bin")
        assert (result.version, result.python_path) == ("1.2", False)

    def test_finds_a_target_folder(self, tmp_path):
        result = modulefile.find_installation(install(tmp_path / "target", inside="."))
        assert (result.home, result.bin, result.python_path) == (tmp_path / "target", tmp_path / "target/bin", True)

    def test_finds_a_clone_with_its_environment(self, tmp_path):
        clone = install(tmp_path / "clone", inside=".")
        (clone / ".venv").mkdir()
        (clone / "bin").rename(clone / ".venv" / "bin")
        result = modulefile.find_installation(clone)
        assert (result.home, result.bin, result.python_path) == (clone, clone / ".venv/bin", False)

    def test_keeps_links_in_the_path(self, tmp_path):
        install(tmp_path / "1.2")
        (tmp_path / "current").symlink_to("1.2")
        assert modulefile.find_installation(tmp_path / "current").bin == tmp_path / "current/bin"

    def test_running_installation_contains_the_package(self):
        home = Path(hpcdist.__file__).absolute().parents[1]
        assert modulefile.running_installation() in (home, *home.parents)

    def test_missing_installation_is_rejected(self, tmp_path):
        with pytest.raises(ConfigurationError, match="no readable hpcdist"):
            modulefile.find_installation(tmp_path)

    def test_installation_without_command_is_rejected(self, tmp_path):
        prefix = install(tmp_path / "env")
        (prefix / "bin" / "hpcdist").unlink()
        with pytest.raises(ConfigurationError, match="no command .*/env/bin/hpcdist"):
            modulefile.find_installation(prefix)

    def test_duplicate_installation_is_rejected(self, tmp_path):
        install(tmp_path / "env")
        install(tmp_path / "env", inside="lib/python3.13/site-packages")
        with pytest.raises(ConfigurationError, match="more than once, in .*3.1.*, .*3.1"):
            modulefile.find_installation(tmp_path / "env")

    def test_installation_without_version_is_rejected(self, tmp_path):
        prefix = install(tmp_path / "env")
        (prefix / "lib/python3.12/site-packages/hpcdist/__init__.py").write_text("")
        with pytest.raises(ConfigurationError, match="no line __version__"):
            modulefile.find_installation(prefix)

    def test_unreadable_installation_is_rejected(self, tmp_path):
        prefix = install(tmp_path / "env")
        (prefix / "lib/python3.12/site-packages/hpcdist/__init__.py").write_bytes(b"\xff")
        with pytest.raises(ConfigurationError, match="__init__.py cannot be read"):
            modulefile.find_installation(prefix)
        with pytest.raises(ConfigurationError, match="no readable hpcdist"):
            modulefile.find_installation(
                tmp_path / ("x" * 256)
            )  # a name that is too long is handled like an unreadable folder

    @pytest.mark.parametrize("name", ["a:b", 'a"b', "a\\b", "a\nb"])
    def test_path_that_path_variable_cannot_hold_is_rejected(self, tmp_path, name):
        with pytest.raises(UsageError, match="a path in PATH cannot contain"):
            modulefile.find_installation(install(tmp_path / name))


def test_command_imports_no_heavy_modules():
    """The command runs on login nodes, so it must import no MPI, arrays or kernels."""
    heavy = ("mpi4py", "numba", "llvmlite", "h5py", "cupy", "numpy", "torch")
    assert jobs.run_light_commands(heavy, ["site", "modulefile", "--in-place"])
