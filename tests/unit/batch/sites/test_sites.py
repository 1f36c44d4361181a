"""Site profiles: search, merge, and errors with the nearest name."""

import dataclasses
import re
from pathlib import Path

import pytest

from harness.job_scripts import PLAIN
from harness.jobs import call_command
from harness.marks import cases
from hpcdist.batch import job as batch_job
from hpcdist.batch import site_search as search
from hpcdist.batch import submission
from hpcdist.batch.site_profile import LAUNCHERS_OF, SiteProfile
from hpcdist.comm.launch.launchers import KINDS
from hpcdist.errors import ConfigurationError, StorageError

KINDS_OF_SITES = ("cray", "ibrun", "parastation", "pbs", "slurm-mpich", "slurm-openmpi", "workstation")
MACHINES = (
    *("alps", "frontier", "juwels-booster", "leonardo", "lumi", "marenostrum5", "perlmutter", "perlmutter-cpu"),
    "polaris",
)
SHIPPED = (*KINDS_OF_SITES, *MACHINES)


@pytest.fixture
def user_profile(tmp_path):
    """``user_profile(name, text)`` writes a profile of this user. ``user_profile.environment`` lets hpcdist find it."""

    def write(name, text):
        path = tmp_path / "hpcdist" / "sites" / f"{name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    write.environment = {"XDG_CONFIG_HOME": str(tmp_path), "PATH": ""}
    return write


def test_shipped_profiles_load_and_state_their_tests():
    assert sorted(search.names({"XDG_CONFIG_HOME": "/nonexistent"})) == sorted(SHIPPED)
    readme = (batch_job.folder(batch_job.TEMPLATES).parent / "README.md").read_text()
    for name in SHIPPED:
        site = search.load(name)
        assert site.name == name and site.description and site.proven
        assert f"\n## {name}" in readme, "each profile needs a section"
    assert {kind for kinds in LAUNCHERS_OF.values() for kind in kinds} == set(KINDS), "a launcher is never used"


@pytest.mark.parametrize("name", MACHINES)
def test_machine_profiles_have_date_and_source(name):
    site = search.load(name)
    text = search.path_of(name).read_text()
    assert re.search(r", 20\d\d-\d\d-\d\d: .*never run there$", site.proven)
    assert re.search(r"20\d\d-\d\d-\d\d", text.partition("\n\n")[0]), "the first comment needs a date"
    assert "https://" in text and site.scheduler.account_required and site.storage.roots
    assert site.limits.cores_per_node or all(part.cores_per_node for part in site.partitions.values())
    assert not any(re.search(r"/\d", module) for module in site.environment.modules), "module versions change"
    if site.scheduler.partition:
        assert site.scheduler.partition in site.partitions


@pytest.mark.parametrize("name", SHIPPED)
def test_no_profile_combines_options_that_slurm_excludes(name):
    """srun rejects --hint with --cpu-bind or --threads-per-core, and sbatch passes its options to srun."""
    site = search.load(name)
    words = {word.partition("=")[0] for word in (*site.scheduler.options, *site.launcher.options)}
    assert "--hint" not in words or not words & {"--cpu-bind", "--threads-per-core", "--ntasks-per-core"}


def test_readme_describes_every_profile_field():
    readme = (batch_job.folder(batch_job.TEMPLATES).parent / "README.md").read_text()
    for item in dataclasses.fields(SiteProfile):
        if item.name not in ("name", "origin"):
            assert f"`{item.name}`" in readme or f"`[{item.name}]`" in readme, item.name
        inner = item.default_factory() if item.default_factory is not dataclasses.MISSING else None
        if dataclasses.is_dataclass(inner):
            for field in dataclasses.fields(inner):
                assert f"`{field.name}`" in readme, f"{item.name}.{field.name}"


def test_profile_overrides_its_base_profile(user_profile):
    user_profile(
        "base",
        "proven = 'run on Slurm'\n[launcher]\noptions = ['-a']\n[environment]\nvariables = { A = '1', B = '2' }\n"
        "[limits]\nmax_nodes = 3\n",
    )
    user_profile("mine", "based_on = 'base'\n[launcher]\noptions = ['-b']\n[environment]\nvariables = { B = '3' }\n")
    site = search.load("mine", user_profile.environment)
    assert (site.name, site.launcher.options, site.limits.max_nodes) == ("mine", ("-b",), 3)
    assert site.environment.variables == {"A": "1", "B": "3"}
    assert site.proven == "not stated; base was: run on Slurm"


def test_profile_search_order_is_user_site_machine(user_profile, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "SYSTEM", tmp_path / "etc")
    places = {"user": tmp_path / "hpcdist" / "sites"} | {name: tmp_path / name for name in ("one", "two", "etc")}
    environment = user_profile.environment | {"HPCDIST_SITE_PATH": f"{tmp_path / 'one'}::{tmp_path / 'two'}"}
    for number, name in enumerate(reversed(places)):
        places[name].mkdir(parents=True, exist_ok=True)
        (places[name] / "cray.toml").write_text(f"based_on = 'cray'\n[limits]\nmax_nodes = {number + 1}\n")
        (places[name] / f"only-{name}.toml").write_text(f"description = '{name}'\n")
        site = search.load("cray", environment)
        assert (site.limits.max_nodes, site.launcher.mpi) == (number + 1, "cray-mpich"), "each is based on the next"
        assert site.origin == str(places[name] / "cray.toml") == str(search.names(environment)["cray"])
    assert [search.load(f"only-{name}", environment).description for name in places] == list(places)
    with pytest.raises(
        ConfigurationError, match=rf"searched {places['user']}, .*one, .*two, .*etc, .*put your profiles into"
    ):
        search.load("nowhere", environment)
    assert "cray" in search.names(user_profile.environment) and "only-one" not in search.names(user_profile.environment)


def test_user_profile_overrides_and_extends_shipped_profile(user_profile):
    path = user_profile("cray", "based_on = 'cray'\n[gpu]\nper_node = 8\norder = []\n")
    site = search.load("cray", user_profile.environment)
    assert (site.gpu.per_node, site.launcher.mpi) == (8, "cray-mpich")
    assert search.names(user_profile.environment)["cray"] == path


@cases(
    "text, words",
    ("[launchr]", "unknown field launchr; the nearest known is 'launcher'"),
    ("[launcher]\nkidn = 'srun'", "unknown field launcher.kidn; the nearest known is 'kind'"),
    ("[launcher]\nkind = 'srum'", "launcher.kind = 'srum'; choose one of"),
    ("[launcher]\nkind = 'mpirun'\nmpi = 'cray-mpich'", "does not start ranks of launcher.mpi = 'cray-mpich'"),
    ("[launcher]\nkind = 'ibrun'\nmpi = 'openmpi'", "choose one of mpirun, srun, flux"),
    ("[launcher]\nkind = 'flux'", "the job has no Flux instance"),
    ("[launcher]\npmi = 'pmix'", "needs launcher.kind = 'srun'"),
    ("[scheduler]\nkind = 'lsf'", "scheduler.kind = 'lsf'"),
    ("[gpu]\nper_node = 'four'", "gpu.per_node"),
    ("[gpu]\nper_node = 4\norder = [0, 1, 1, 2]", "list each GPU of a node once"),
    ("[gpu]\nper_node = -1", "at least 0"),
    ("[gpu]\nrequest = 'gpu'", "gpu.request"),
    ("[scheduler]\nmem = '4 GB'", "scheduler.mem '4 GB': expected MiB"),
    ("[scheduler]\nkind = 'pbs'\nqos = 'debug'", "scheduler.qos = 'debug' with scheduler.kind = 'pbs'"),
    ("[scheduler]\nkind = 'none'\nconstraint = 'gpu'", "scheduler.constraint = 'gpu'"),
    ("[scheduler]\nkind = 'pbs'\n[storage]\nsbcast = true", "storage.sbcast"),
    ("[limits]\nmem_per_node = 'all'", "mem_per_node 'all'"),
    ("[qos.a]\nmax_wall = '1'", "unknown field qos.a.max_wall; .*'max_walltime'"),
    ("[partitions.a]\nmax_wall = '1'", "unknown field partitions.a.max_wall; .*'max_walltime'"),
    ("[partitions.a]\nmax_walltime = '10:00'", "expected D-HH:MM:SS"),
    ("[limits]\ngpus_per_node = -7", "gpus_per_node = -7"),
    ("[limits]\nmax_nodes = -1", "max_nodes = -1"),
    ("[[storage.roots]]\npaht = '/a'", "unknown field storage.roots 1: paht; the nearest known is 'path'"),
    ("[[storage.roots]]\npath = 'a'", "not absolute"),
    ("[storage]\nnode_local = '$TMPDIR'", "not an absolute path"),
    ("[environment]\nmodules = ['-f']", "not a valid module"),
    ("[environment]\nmodules = ['a;b']", "not a valid module"),
    ("[environment.variables]\n'A-B' = '1'", "is not a valid variable name"),
    ("[environment.variables]\nA = 1", "environment.variables"),
    ("based_on = 'slrm-openmpi'", "nearest known is 'slurm-openmpi'"),
    ("based_on = 'mine'", "based on itself"),
    ("based_on = 1", "give the name of another profile"),
    ("x = ", "not valid TOML"),
)
def test_invalid_profiles_are_rejected(user_profile, text, words):
    user_profile("mine", text)
    with pytest.raises(ConfigurationError, match=words):
        search.load("mine", user_profile.environment)


def test_profile_is_selected_by_option_or_variable(user_profile, tmp_path):
    path = user_profile("mine", "description = 'ours'")
    for environment in ({"HPCDIST_SITE": "mine"}, {"HPCDIST_SITE": str(path)}):
        assert search.load_selected(None, user_profile.environment | environment).description == "ours"
    assert search.load_selected("cray", user_profile.environment | {"HPCDIST_SITE": "mine"}).name == "cray"
    with pytest.raises(StorageError, match="no such file"):
        search.load_selected(str(tmp_path / "none.toml"), user_profile.environment)


@pytest.mark.parametrize(
    ("programs", "name"), [(["sbatch", "qsub"], "slurm-openmpi"), (["qsub"], "pbs"), ([], "slurm-openmpi")]
)
def test_generic_profile_matches_the_scheduler(user_profile, tmp_path, monkeypatch, programs, name):
    (tmp_path / "bin").mkdir()
    for program in programs:
        (tmp_path / "bin" / program).touch(mode=0o755)
    monkeypatch.setattr(search.mpirun, "candidates", lambda environment: [])
    assert search.load_selected(None, user_profile.environment | {"PATH": str(tmp_path / "bin")}).name == name


@cases(
    "output, name",
    ("HYDRA build details:\n    Version: 5.0.2", "slurm-mpich"),
    ("mpirun (Open MPI) 5.0.11", "slurm-openmpi"),
    ("not on this login node", "slurm-openmpi"),
)
def test_generic_profile_matches_the_mpi(user_profile, tmp_path, monkeypatch, output, name):
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\necho '{output}'\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setattr(search.mpirun, "candidates", lambda environment: [tmp_path / "mpirun"])
    assert search.load_selected(None, user_profile.environment).name == name


def test_account_variable_gets_the_site_suffix(monkeypatch):
    job = dataclasses.replace(PLAIN, account=None)
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    assert search.load("perlmutter").complete(job).account is None
    monkeypatch.setenv("SBATCH_ACCOUNT", "m1234")
    assert search.load("perlmutter").complete(job).account == "m1234_g"
    assert search.load("slurm-mpich").complete(job).account is None  # sbatch reads the variable


def test_paths_hidden_from_nodes_are_found():
    site = search.load("slurm-openmpi")
    assert search.hidden_paths({"it": Path("/scratch/x")}, site) == []
    assert search.hidden_paths({"it": Path("/tmp/x")}, site) == [
        "it /tmp/x is below /tmp, which is separate on each node"
    ]
    assert search.hidden_paths({"it": Path("/tmpx")}, site) == []
    cray = search.load("cray")
    assert search.hidden_paths({"it": Path("/scratch/x")}, cray) == []
    (output,) = search.hidden_paths({"it": Path("/nowhere/x")}, cray)
    assert "not below /scratch, /project, /home" in output
    for python in ("/usr/bin/python3", "/opt/cray/pe/python/3.11.7/bin/python3"):
        assert search.hidden_paths({"it": Path(python)}, cray) == [], "system files are on every node"


@pytest.mark.parametrize("name", ["cray", "pbs", "parastation"])
def test_jobs_without_gpus_set_no_gpu_variables(name):
    """With these variables, Cray MPICH ends ranks whose Python is not linked with its GPU library."""
    profile = search.load(name)
    for job, asks in ((PLAIN, False), (dataclasses.replace(PLAIN, gpus_per_node=4), True)):
        text = submission.render(job, profile)
        assert all((f"\nexport {variable}=" in text) == asks for variable in profile.gpu.variables)
    assert profile.gpu.variables and not set(profile.gpu.variables) & set(profile.environment.variables)


def test_unusable_profile_does_not_hide_other_profiles(tmp_path, monkeypatch, capsys):
    (tmp_path / "hpcdist" / "sites").mkdir(parents=True)
    (tmp_path / "hpcdist" / "sites" / "mine.toml").write_text("nodes = 1\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HPCDIST_SITE_PATH", str(tmp_path / "of the site"))
    (tmp_path / "of the site").mkdir()
    (tmp_path / "of the site" / "ours.toml").write_text("description = 'our cluster'\n")
    code, out, _ = call_command(capsys, "site", "list")
    assert code == 0 and re.search(rf"^ours +our cluster \[{tmp_path}/of the site\]$", out, re.MULTILINE), out
    assert re.search(r"^cray +HPE .* node$", out, re.MULTILINE), out
    assert re.search(r"^mine +cannot be used: .*unknown field nodes", out, re.MULTILINE)
    assert all(name in out for name in SHIPPED)


@pytest.mark.parametrize("arguments", [["list"], ["show", "cray"], ["show", "--json", "pbs"]])
def test_site_commands_print_profiles(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    code, out, _ = call_command(capsys, "site", *arguments)
    assert code == 0
    words = {"list": SHIPPED, "show": ("cray", "cray-mpich"), "--json": ('"kind": "pbs"',)}
    for word in words["--json" if "--json" in arguments else arguments[0]]:
        assert word in out
