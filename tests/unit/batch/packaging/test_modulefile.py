"""Modulefiles as text: what is shipped is what is rendered, and a value never becomes a command."""

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
from hpcdist.batch import job
from hpcdist.batch.packaging import modulefile
from hpcdist.batch.packaging.modulefile import Modulefile
from hpcdist.cli.site import modulefile as site_modulefile
from hpcdist.errors import ConfigurationError, StorageError, UsageError

# Letters that mean something to Lua, Tcl or a shell are drawn more often than others.
HOSTILE = st.lists(st.one_of(st.sampled_from([*"\\\"'$[]{}();#`=%\n\r\t\0\x1a ", "]]", "]=]", "é"]), st.text()))
TEXTS = st.lists(HOSTILE.map("".join), min_size=1, max_size=20)

SHELL = {"CDPATH": "/", "PATH": "/usr/bin:/bin"}
ALONE = Path(hpcdist.__file__).parent / "libexec" / "hpcdist"

# Each writes every word in hexadecimal digits, on a line of its own.
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
def test_the_command_alone_does_not_find_itself(tmp_path, there):
    """By a link in /usr/bin, say, where /bin is a link to it."""
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


def words_of(program, script, folder):
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed")
    (folder / "script").write_bytes(script.encode())
    line = [found, str(folder / "script")]
    # In this locale Tcl takes bytes for characters, as they are.
    done = subprocess.run(line, env={"LC_ALL": "C"}, capture_output=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr.decode() + script
    return [bytes.fromhex(line).decode() for line in done.stdout.decode().split("\n")[:-1]]


@settings(max_examples=40, deadline=None)
@given(texts=TEXTS)
@pytest.mark.full
def test_lua_reads_every_text_as_it_is(texts, tmp_path_factory):
    script = LUA.format(words=", ".join(map(modulefile.lua, texts)))
    assert words_of("lua", script, tmp_path_factory.mktemp("lua")) == texts


@settings(max_examples=40, deadline=None)
@given(texts=TEXTS)
@pytest.mark.full
def test_tcl_reads_every_text_as_it_is(texts, tmp_path_factory):
    script = TCL.format(words="\n".join(f"say {modulefile.tcl(text)}" for text in texts))
    assert words_of("tclsh", script, tmp_path_factory.mktemp("tcl")) == texts


@pytest.mark.parametrize("kind", modulefile.KINDS)
def test_every_value_in_a_template_is_quoted(kind):
    values = re.findall(r"{{(.*?)}}", (job.folder(job.MODULEFILES) / f"hpcdist.{kind}.j2").read_text())
    assert len(values) >= 10
    assert [value for value in values if not value.endswith(f"| {kind} ")] in ([], [' "#%Module1.0" '])


@pytest.mark.parametrize("kind", modulefile.KINDS)
def test_the_shipped_ones_are_what_is_rendered(kind):
    name = hpcdist.__version__ + modulefile.KINDS[kind]
    shipped = job.folder(job.MODULEFILES) / "hpcdist" / name
    cure = "hpcdist site modulefile --in-place --output modulefiles --force"
    assert shipped.read_text() == modulefile.render(kind, Modulefile()), f"render them again: {cure}"


def test_the_completion_is_clean_shell(tmp_path):
    checker = shutil.which("shellcheck") or shutil.which("shellcheck", path=Path(sys.executable).parent)
    if checker is None:
        pytest.skip("shellcheck is not installed")
    body = modulefile.source()["completion"]["bash"]
    (tmp_path / "function").write_text(f"#!/bin/bash\ncomplete_it() {{\n{body}}}\ncomplete_it hpcdist\n")
    done = jobs.run([checker, str(tmp_path / "function")])
    assert done.returncode == 0, done.stdout


def test_a_variable_that_is_known_is_one_that_is_read():
    root = Path(hpcdist.__file__).parent
    code = "\n".join(path.read_text() for path in root.rglob("*.py"))
    assert {name for name in modulefile.source()["variables"] if f'"{name}"' not in code} == set()


def test_prints_the_installation_that_was_asked_for(tmp_path):
    prefix = install(tmp_path / "env")
    printed = invoke("--kind=lua", f"--prefix={prefix}", "--mpi=openmpi/5.0.3", "--depends-on=cuda", "--setenv=A=b=c")
    assert printed.exit_code == 0, printed.output
    lines = printed.stdout.splitlines()
    assert f'local home = "{prefix}/lib/python3.12/site-packages"' in lines
    assert f'local bin = "{prefix}/bin"' in lines
    assert [line for line in lines if "depends_on" in line] == ['depends_on("openmpi/5.0.3")', 'depends_on("cuda")']
    assert 'pushenv("A", "b=c")' in lines and "This loads its MPI: openmpi/5.0.3." in printed.stdout
    assert 'local path = pathJoin(home, "hpcdist/libexec") -- the command alone: no python3, pip or mpirun' in lines
    assert 'prepend_path("PATH", path)' in lines and "PYTHONPATH" not in printed.stdout


@pytest.mark.parametrize(("kind", "line"), [("lua", "local path = bin "), ("tcl", "set path $bin ")])
def test_the_whole_environment_is_shown_where_that_is_asked_for(tmp_path, kind, line):
    prefix = install(tmp_path / "env", version="0.1.0")
    shutil.rmtree(prefix / "lib/python3.12/site-packages/hpcdist/libexec")
    with pytest.raises(ConfigurationError, match=r"libexec/hpcdist is missing, .* in hpcdist 0\.1\.0; .*--environment"):
        raise invoke(f"--kind={kind}", f"--prefix={prefix}").exception
    printed = invoke(f"--kind={kind}", f"--prefix={prefix}", "--environment").stdout
    assert f"\n{line}" in printed and "libexec" not in printed


class TestTheCommandAlone:
    """hpcdist/libexec/hpcdist, which is what a modulefile shows."""

    def run(self, path, code=0):
        done = jobs.run([str(path), "run", "a b"], env=SHELL)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    @pytest.mark.parametrize("inside", ["lib/python3.12/site-packages", "lib/python3/dist-packages", "."])
    def test_starts_that_of_its_installation(self, tmp_path, inside):
        prefix = install(tmp_path / "it's $HOME; #", inside)
        assert self.run(prefix / inside / "hpcdist" / "libexec" / "hpcdist").startswith(f"{prefix}/bin/hpcdist run a b")

    def test_starts_that_of_the_environment_of_a_clone(self, tmp_path):
        clone = install(tmp_path / "clone", inside=".")
        shutil.copytree(clone / "bin", clone / ".venv" / "bin")
        assert self.run(clone / "hpcdist/libexec/hpcdist") == f"{clone}/.venv/bin/hpcdist run a b\n"

    def test_a_link_to_the_installation_stays_a_link(self, tmp_path):
        install(tmp_path / "1.2")
        (tmp_path / "current").symlink_to("1.2")
        inside = "lib/python3.12/site-packages/hpcdist/libexec/hpcdist"
        assert self.run(tmp_path / "current" / inside) == f"{tmp_path}/current/bin/hpcdist run a b\n"

    def test_a_link_to_it_is_followed(self, tmp_path):
        prefix = install(tmp_path / "env")
        (tmp_path / "hpcdist").symlink_to(prefix / "lib/python3.12/site-packages/hpcdist/libexec/hpcdist")
        assert self.run(tmp_path / "hpcdist") == f"{prefix}/bin/hpcdist run a b\n"

    def test_says_where_it_has_looked(self, tmp_path):
        prefix = install(tmp_path / "env")
        (prefix / "bin" / "hpcdist").unlink()
        said = self.run(prefix / "lib/python3.12/site-packages/hpcdist/libexec/hpcdist", code=69)
        assert f"no command hpcdist in {prefix}/bin or " in said


def test_prints_both_under_their_names(tmp_path):
    printed = invoke("--prefix", install(tmp_path / "env")).stdout
    assert re.findall("^==> (.*) <==$", printed, re.MULTILINE) == ["hpcdist/1.2", "hpcdist/1.2.lua"]


def test_writes_both_and_replaces_nothing_unasked(tmp_path):
    prefix, modules = install(tmp_path / "env"), tmp_path / "modules"
    first = invoke("--prefix", prefix, "--output", modules)
    files = [modules / "hpcdist" / name for name in ("1.2", "1.2.lua")]
    assert first.stdout.splitlines() == [str(path) for path in files]
    assert sorted((modules / "hpcdist").iterdir()) == files, "nothing else is left there"
    assert files[0].read_text().startswith("#%Module1.0\n")
    assert invoke("--prefix", prefix, "--output", modules).exit_code == 0, "the same content is no conflict"
    before = files[0].read_text()
    with pytest.raises(UsageError, match=r"1\.2, .*1\.2\.lua: exists with another content; --force"):
        raise invoke("--prefix", prefix, "--output", modules, "--mpi=mpich").exception
    assert files[0].read_text() == before
    assert invoke("--prefix", prefix, "--output", modules, "--mpi=mpich", "--force").exit_code == 0
    assert "mpich" in files[0].read_text() and "mpich" in files[1].read_text()


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        raise invoke("--prefix", install(tmp_path / "env"), "--output", tmp_path / "file" / "below").exception


@cases(
    "arguments, message",
    (["--setenv=HPCDIST_STIE=x"], "no variable HPCDIST_STIE; the nearest known is 'HPCDIST_SITE'"),
    (["--setenv=HPCDIST_XXXXXXXX=x"], "known are: HPCDIST_SITE, "),
    (["--setenv=A"], "--setenv A: expected NAME=VALUE"),
    (["--setenv=A-B=1"], "'A-B' is no name of a variable"),
    (["--setenv=A=1", "--setenv=A=2"], "A: is there twice, '1' and '2'"),
    (["--setenv=A=1\n2"], "control character"),
    (["--setenv=PATH=/x"], "PATH is set by the modulefile"),
    (["--setenv=HPCDIST_ROOT=/x"], "HPCDIST_ROOT is set by the modulefile"),
    (["--mpi=a b"], "'a b' is no name of a module"),
    (["--depends-on=-x"], "'-x' is no name of a module"),
    (["--depends-on=[exit]"], "is no name of a module"),
    (["--in-place", "--prefix=/"], "leave out --prefix"),
    (["--force"], "--output DIR"),
)
def test_refuses_what_no_module_system_would_understand(arguments, message, tmp_path):
    with pytest.raises(UsageError) as refused:
        raise invoke("--in-place", *arguments).exception
    assert message in str(refused.value)


def test_a_recipe_key_is_a_known_variable():
    assert (
        'pushenv("HPCDIST_SET__RUN__STEPS", "5")'
        in invoke("--in-place", "--kind=lua", "--setenv=HPCDIST_SET__RUN__STEPS=5").stdout
    )


class TestFind:
    def test_an_environment(self, tmp_path):
        prefix = install(tmp_path / "env")
        (prefix / "lib64").symlink_to("lib")
        found = modulefile.find_installation(prefix)
        assert (found.home, found.bin) == (prefix / "lib/python3.12/site-packages", prefix / "bin")
        assert (found.version, found.python_path) == ("1.2", False)

    def test_a_target(self, tmp_path):
        found = modulefile.find_installation(install(tmp_path / "target", inside="."))
        assert (found.home, found.bin, found.python_path) == (tmp_path / "target", tmp_path / "target/bin", True)

    def test_a_clone_with_its_environment(self, tmp_path):
        clone = install(tmp_path / "clone", inside=".")
        (clone / ".venv").mkdir()
        (clone / "bin").rename(clone / ".venv" / "bin")
        found = modulefile.find_installation(clone)
        assert (found.home, found.bin, found.python_path) == (clone, clone / ".venv/bin", False)

    def test_a_link_stays_a_link(self, tmp_path):
        install(tmp_path / "1.2")
        (tmp_path / "current").symlink_to("1.2")
        assert modulefile.find_installation(tmp_path / "current").bin == tmp_path / "current/bin"

    def test_this_one_is_where_the_package_is(self):
        home = Path(hpcdist.__file__).absolute().parents[1]
        assert modulefile.running_installation() in (home, *home.parents)

    def test_none(self, tmp_path):
        with pytest.raises(ConfigurationError, match="there is no hpcdist"):
            modulefile.find_installation(tmp_path)

    def test_no_command(self, tmp_path):
        prefix = install(tmp_path / "env")
        (prefix / "bin" / "hpcdist").unlink()
        with pytest.raises(ConfigurationError, match="no command .*/env/bin/hpcdist"):
            modulefile.find_installation(prefix)

    def test_two(self, tmp_path):
        install(tmp_path / "env")
        install(tmp_path / "env", inside="lib/python3.13/site-packages")
        with pytest.raises(ConfigurationError, match="more than once, in .*3.1.*, .*3.1"):
            modulefile.find_installation(tmp_path / "env")

    def test_no_version(self, tmp_path):
        prefix = install(tmp_path / "env")
        (prefix / "lib/python3.12/site-packages/hpcdist/__init__.py").write_text("")
        with pytest.raises(ConfigurationError, match="no line __version__"):
            modulefile.find_installation(prefix)

    def test_what_cannot_be_read(self, tmp_path):
        prefix = install(tmp_path / "env")
        (prefix / "lib/python3.12/site-packages/hpcdist/__init__.py").write_bytes(b"\xff")
        with pytest.raises(ConfigurationError, match="__init__.py cannot be read"):
            modulefile.find_installation(prefix)
        with pytest.raises(ConfigurationError, match="there is no hpcdist that can be read"):
            modulefile.find_installation(
                tmp_path / ("x" * 256)
            )  # no more than a folder of somebody who lets nobody look

    @pytest.mark.parametrize("name", ["a:b", 'a"b', "a\\b", "a\nb"])
    def test_a_path_that_path_cannot_hold(self, tmp_path, name):
        with pytest.raises(UsageError, match="cannot put a path with"):
            modulefile.find_installation(install(tmp_path / name))


def test_it_is_light():
    """A login node runs it: no MPI, no arrays, no kernels."""
    heavy = ("mpi4py", "numba", "llvmlite", "h5py", "cupy", "numpy", "torch")
    assert jobs.light(heavy, ["site", "modulefile", "--in-place"])
