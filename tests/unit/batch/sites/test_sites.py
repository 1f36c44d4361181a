"""Profiles of sites: found, merged, and refused with the nearest name."""

import dataclasses
import re
from pathlib import Path

import pytest

from harness.job_scripts import PLAIN
from harness.jobs import called
from harness.marks import cases
from hpcdist.batch import job as batch_job
from hpcdist.batch import submission
from hpcdist.batch.sites import search
from hpcdist.batch.sites.profile import LAUNCHERS_OF, SiteProfile
from hpcdist.comm.launch.launchers import KINDS
from hpcdist.errors import ConfigurationError, StorageError

KINDS_OF_SITES = ("cray", "ibrun", "parastation", "pbs", "slurm-mpich", "slurm-openmpi", "workstation")
MACHINES = (
    *("alps", "frontier", "juwels-booster", "leonardo", "lumi", "marenostrum5", "perlmutter", "perlmutter-cpu"),
    "polaris",
)
SHIPPED = (*KINDS_OF_SITES, *MACHINES)


@pytest.fixture
def own(tmp_path):
    """``own(name, text)`` writes a profile of this user; ``own.environment`` finds it."""

    def write(name, text):
        path = tmp_path / "hpcdist" / "sites" / f"{name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    write.environment = {"XDG_CONFIG_HOME": str(tmp_path), "PATH": ""}
    return write


def test_what_is_shipped_loads_and_says_what_of_it_was_run():
    assert sorted(search.names({"XDG_CONFIG_HOME": "/nonexistent"})) == sorted(SHIPPED)
    readme = (batch_job.folder(batch_job.TEMPLATES).parent / "README.md").read_text()
    for name in SHIPPED:
        site = search.load(name)
        assert site.name == name and site.description and site.proven
        assert f"\n## {name}" in readme, "a page for each"
    assert {kind for kinds in LAUNCHERS_OF.values() for kind in kinds} == set(KINDS), "every launcher starts something"


@pytest.mark.parametrize("name", MACHINES)
def test_a_profile_of_a_machine_is_dated_and_says_where_it_is_from(name):
    site = search.load(name)
    text = search.path_of(name).read_text()
    assert re.search(r", 20\d\d-\d\d-\d\d: .*never run there$", site.proven)
    assert re.search(r"20\d\d-\d\d-\d\d", text.partition("\n\n")[0]), "its first comment has the date"
    assert "https://" in text and site.scheduler.account_required and site.storage.roots
    assert site.limits.cores_per_node or all(part.cores_per_node for part in site.partitions.values())
    assert not any(re.search(r"/\d", module) for module in site.environment.modules), "versions change"
    if site.scheduler.partition:
        assert site.scheduler.partition in site.partitions


@pytest.mark.parametrize("name", SHIPPED)
def test_no_profile_says_what_slurm_excludes(name):
    """srun takes --hint neither with --cpu-bind nor with --threads-per-core; sbatch hands its options on to it."""
    site = search.load(name)
    words = {word.partition("=")[0] for word in (*site.scheduler.options, *site.launcher.options)}
    assert "--hint" not in words or not words & {"--cpu-bind", "--threads-per-core", "--ntasks-per-core"}


def test_every_field_is_described():
    readme = (batch_job.folder(batch_job.TEMPLATES).parent / "README.md").read_text()
    for item in dataclasses.fields(SiteProfile):
        if item.name not in search.INTERNAL_FIELDS:
            assert f"`{item.name}`" in readme or f"`[{item.name}]`" in readme, item.name
        inner = item.default_factory() if item.default_factory is not dataclasses.MISSING else None
        if dataclasses.is_dataclass(inner):
            for field in dataclasses.fields(inner):
                assert f"`{field.name}`" in readme, f"{item.name}.{field.name}"


def test_a_profile_goes_over_the_one_it_is_based_on(own):
    own(
        "base",
        "proven = 'run on Slurm'\n[launcher]\noptions = ['-a']\n[environment]\nvariables = { A = '1', B = '2' }\n"
        "[limits]\nmax_nodes = 3\n",
    )
    own("mine", "based_on = 'base'\n[launcher]\noptions = ['-b']\n[environment]\nvariables = { B = '3' }\n")
    site = search.load("mine", own.environment)
    assert (site.name, site.launcher.options, site.limits.max_nodes) == ("mine", ("-b",), 3)
    assert site.environment.variables == {"A": "1", "B": "3"}
    assert site.proven == "not said; base was: run on Slurm"


def test_profiles_are_looked_for_in_the_folders_of_the_user_the_site_and_the_machine(own, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "SYSTEM", tmp_path / "etc")
    places = {"user": tmp_path / "hpcdist" / "sites"} | {name: tmp_path / name for name in ("one", "two", "etc")}
    environment = own.environment | {"HPCDIST_SITE_PATH": f"{tmp_path / 'one'}::{tmp_path / 'two'}"}
    for number, name in enumerate(reversed(places)):
        places[name].mkdir(parents=True, exist_ok=True)
        (places[name] / "cray.toml").write_text(f"based_on = 'cray'\n[limits]\nmax_nodes = {number + 1}\n")
        (places[name] / f"only-{name}.toml").write_text(f"description = '{name}'\n")
        site = search.load("cray", environment)
        assert (site.limits.max_nodes, site.launcher.mpi) == (number + 1, "cray-mpich"), "each is based on the next"
        assert site.origin == str(places[name] / "cray.toml") == str(search.names(environment)["cray"])
    assert [search.load(f"only-{name}", environment).description for name in places] == list(places)
    with pytest.raises(
        ConfigurationError, match=rf"looked in {places['user']}, .*one, .*two, .*etc, .*your own go into"
    ):
        search.load("nowhere", environment)
    assert "cray" in search.names(own.environment) and "only-one" not in search.names(own.environment)


def test_a_users_profile_hides_ours_and_may_be_based_on_it(own):
    path = own("cray", "based_on = 'cray'\n[gpu]\nper_node = 8\norder = []\n")
    site = search.load("cray", own.environment)
    assert (site.gpu.per_node, site.launcher.mpi) == (8, "cray-mpich")
    assert search.names(own.environment)["cray"] == path


@cases(
    "text, words",
    ("[launchr]", "unknown field 'launchr'.*nearest known is 'launcher'"),
    ("[launcher]\nkidn = 'srun'", "unknown field 'launcher.kidn'.*'launcher.kind'"),
    ("[launcher]\nkind = 'srum'", "launcher.kind = 'srum'; choose one of"),
    ("[launcher]\nkind = 'mpirun'\nmpi = 'cray-mpich'", "does not start ranks of launcher.mpi = 'cray-mpich'"),
    ("[launcher]\nkind = 'ibrun'\nmpi = 'openmpi'", "choose one of mpirun, srun, flux"),
    ("[launcher]\nkind = 'flux'", "nothing starts a Flux instance"),
    ("[launcher]\npmi = 'pmix'", "only srun has a choice"),
    ("[scheduler]\nkind = 'lsf'", "scheduler.kind = 'lsf'"),
    ("[gpu]\nper_node = 'four'", "gpu.per_node"),
    ("[gpu]\nper_node = 4\norder = [0, 1, 1, 2]", "name each GPU of a node once"),
    ("[gpu]\nper_node = -1", "at least 0"),
    ("[gpu]\nrequest = 'gpu'", "gpu.request"),
    ("[scheduler]\nmem = '4 GB'", "scheduler.mem '4 GB': expected MiB"),
    ("[scheduler]\nkind = 'pbs'\nqos = 'debug'", "scheduler.qos = 'debug' with scheduler.kind = 'pbs'"),
    ("[scheduler]\nkind = 'none'\nconstraint = 'gpu'", "scheduler.constraint = 'gpu'"),
    ("[scheduler]\nkind = 'pbs'\n[storage]\nsbcast = true", "storage.sbcast"),
    ("[limits]\nmem_per_node = 'all'", "mem_per_node 'all'"),
    ("[qos.a]\nmax_wall = '1'", "unknown field 'qos.a.max_wall'.*'qos.a.max_walltime'"),
    ("[partitions.a]\nmax_wall = '1'", "unknown field 'partitions.a.max_wall'.*'partitions.a.max_walltime'"),
    ("[partitions.a]\nmax_walltime = '10:00'", "expected D-HH:MM:SS"),
    ("[limits]\ngpus_per_node = -7", "gpus_per_node = -7"),
    ("[limits]\nmax_nodes = -1", "max_nodes = -1"),
    ("[[storage.roots]]\npaht = '/a'", "unknown field 'storage.roots.paht'"),
    ("[[storage.roots]]\npath = 'a'", "not absolute"),
    ("[storage]\nnode_local = '$TMPDIR'", "not an absolute path"),
    ("[environment]\nmodules = ['-f']", "no name of a module"),
    ("[environment]\nmodules = ['a;b']", "no name of a module"),
    ("[environment.variables]\n'A-B' = '1'", "no name of a variable"),
    ("[environment.variables]\nA = 1", "environment.variables"),
    ("based_on = 'slrm-openmpi'", "nearest known is 'slurm-openmpi'"),
    ("based_on = 'mine'", "based on itself"),
    ("based_on = 1", "give the name of another profile"),
    ("x = ", "not valid TOML"),
)
def test_what_no_profile_can_say(own, text, words):
    own("mine", text)
    with pytest.raises(ConfigurationError, match=words):
        search.load("mine", own.environment)


def test_where_a_profile_is_named(own, tmp_path):
    path = own("mine", "description = 'ours'")
    for environment in ({"HPCDIST_SITE": "mine"}, {"HPCDIST_SITE": str(path)}):
        assert search.load_selected(None, own.environment | environment).description == "ours"
    assert search.load_selected("cray", own.environment | {"HPCDIST_SITE": "mine"}).name == "cray"
    with pytest.raises(StorageError, match="no such file"):
        search.load_selected(str(tmp_path / "none.toml"), own.environment)


@pytest.mark.parametrize(
    ("programs", "name"), [(["sbatch", "qsub"], "slurm-openmpi"), (["qsub"], "pbs"), ([], "slurm-openmpi")]
)
def test_the_generic_profile_is_that_of_the_scheduler(own, tmp_path, monkeypatch, programs, name):
    (tmp_path / "bin").mkdir()
    for program in programs:
        (tmp_path / "bin" / program).touch(mode=0o755)
    monkeypatch.setattr(search.mpirun, "candidates", lambda environment: [])
    assert search.load_selected(None, own.environment | {"PATH": str(tmp_path / "bin")}).name == name


@cases(
    "said, name",
    ("HYDRA build details:\n    Version: 5.0.2", "slurm-mpich"),
    ("mpirun (Open MPI) 5.0.11", "slurm-openmpi"),
    ("not on this login node", "slurm-openmpi"),
)
def test_the_generic_profile_is_that_of_the_mpi(own, tmp_path, monkeypatch, said, name):
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\necho '{said}'\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setattr(search.mpirun, "candidates", lambda environment: [tmp_path / "mpirun"])
    assert search.load_selected(None, own.environment).name == name


def test_an_account_of_the_shell_gets_the_suffix_of_the_site(monkeypatch):
    job = dataclasses.replace(PLAIN, account=None)
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    assert search.load("perlmutter").complete(job).account is None
    monkeypatch.setenv("SBATCH_ACCOUNT", "m1234")
    assert search.load("perlmutter").complete(job).account == "m1234_g"
    assert search.load("slurm-mpich").complete(job).account is None  # sbatch reads it


def test_what_nodes_see():
    site = search.load("slurm-openmpi")
    assert search.hidden_paths({"it": Path("/scratch/x")}, site) == []
    assert search.hidden_paths({"it": Path("/tmp/x")}, site) == [
        "it /tmp/x is under /tmp, of which each node has its own"
    ]
    assert search.hidden_paths({"it": Path("/tmpx")}, site) == []
    cray = search.load("cray")
    assert search.hidden_paths({"it": Path("/scratch/x")}, cray) == []
    (said,) = search.hidden_paths({"it": Path("/nowhere/x")}, cray)
    assert "under none of /scratch, /project, /home" in said
    for python in ("/usr/bin/python3", "/opt/cray/pe/python/3.11.7/bin/python3"):
        assert search.hidden_paths({"it": Path(python)}, cray) == [], "it comes with the nodes, as their modules do"


@pytest.mark.parametrize("name", ["cray", "pbs", "parastation"])
def test_jobs_without_gpus_do_not_ask_mpi_for_them(name):
    """Cray MPICH ends ranks that ask, where the Python that runs was not linked with its GPU library."""
    profile = search.load(name)
    for job, asks in ((PLAIN, False), (dataclasses.replace(PLAIN, gpus_per_node=4), True)):
        text = submission.render(job, profile)
        assert all((f"\nexport {variable}=" in text) == asks for variable in profile.gpu.variables)
    assert profile.gpu.variables and not set(profile.gpu.variables) & set(profile.environment.variables)


def test_a_profile_that_cannot_be_used_hides_no_other(tmp_path, monkeypatch, capsys):
    (tmp_path / "hpcdist" / "sites").mkdir(parents=True)
    (tmp_path / "hpcdist" / "sites" / "mine.toml").write_text("nodes = 1\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HPCDIST_SITE_PATH", str(tmp_path / "of the site"))
    (tmp_path / "of the site").mkdir()
    (tmp_path / "of the site" / "ours.toml").write_text("description = 'our cluster'\n")
    code, out, _ = called(capsys, "site", "list")
    assert code == 0 and re.search(rf"^ours +our cluster \[{tmp_path}/of the site\]$", out, re.MULTILINE), out
    assert re.search(r"^cray +HPE .* node$", out, re.MULTILINE), out
    assert re.search(r"^mine +cannot be used: unknown field 'nodes'", out, re.MULTILINE)
    assert all(name in out for name in SHIPPED)


@pytest.mark.parametrize("arguments", [["list"], ["show", "cray"], ["show", "--json", "pbs"]])
def test_profiles_are_shown(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    code, out, _ = called(capsys, "site", *arguments)
    assert code == 0
    words = {"list": SHIPPED, "show": ("cray", "cray-mpich"), "--json": ('"kind": "pbs"',)}
    for word in words["--json" if "--json" in arguments else arguments[0]]:
        assert word in out
