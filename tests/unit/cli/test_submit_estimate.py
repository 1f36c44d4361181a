"""The estimate that `hpcdist submit` shows: on stderr, where the cluster is known, and never in the way of a job."""

from dataclasses import replace

import pytest

from harness.jobs import called
from hpcdist.batch.sites import search
from hpcdist.cli.submit import command
from hpcdist.planner.cluster import hardware, toml_file
from hpcdist.training.use_cases import plan
from hpcdist.training.use_cases.plan import plan_of_subject

RECIPE = """
[model]
layers = 4
hidden = 64
heads = 4
[data]
context = 64
[run]
steps = 50
global_batch = 16
[checkpoint]
every_steps = 10
"""


@pytest.fixture
def submit(tmp_path, monkeypatch, capsys):
    """Return a function that renders a job, and returns its script and what was told; profiles go into ``sites``."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(search.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)

    def run(*arguments, site="slurm-openmpi"):
        words = ["recipe.toml", "--nodes", "2", "--ranks-per-node", "4", "--site", site, "--dry-run"]
        code, out, err = called(capsys, "submit", *words, *arguments)
        assert code == 0, err
        return out, [line for line in err.splitlines() if "estimate" in line]

    return run


@pytest.fixture
def profile(tmp_path):
    """Return a function that writes a profile of a site."""

    def write(cluster):
        folder = tmp_path / "config" / "hpcdist" / "sites"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "mine.toml").write_text(f"based_on = 'slurm-openmpi'\ncluster = '{cluster}'\n")
        return folder

    return write


def test_a_site_that_names_no_cluster_shows_none(submit):
    assert submit()[1] == []


def test_the_cluster_may_be_asked_for(submit):
    script, told = submit("--cluster", "a100-selene")
    assert len(told) == 1
    assert told[0].startswith("estimate: fits: ") and "for 50 steps" in told[0] and "(a100-selene)" in told[0]
    assert script == submit()[0]  # of the job nothing changes


def test_the_cluster_may_be_that_of_the_site(submit, profile):
    profile("h100-hgx")
    assert "(h100-hgx)" in submit(site="mine")[1][0]
    assert "(a100-selene)" in submit("--cluster", "a100-selene", site="mine")[1][0]


def test_a_profile_shows_its_cluster(submit, profile, capsys):
    profile("h100-hgx")
    assert 'cluster = "h100-hgx"\n' in called(capsys, "site", "show", "mine")[1]


def test_a_file_lies_beside_the_profile(submit, profile):
    folder = profile("ours.toml")
    own = replace(toml_file.read("a100-selene"), name="ours", devices=16)  # two nodes
    (folder / "ours.toml").write_text(toml_file.dump(own))
    assert "(ours)" in submit(site="mine")[1][0]


def test_of_a_node_what_the_job_asks_for_is_planned(monkeypatch, submit):
    seen = []
    monkeypatch.setattr(plan, "plan_of_subject", lambda subject, on: seen.append(on) or plan_of_subject(subject, on))
    submit("--cluster", "h100-hgx")  # 4 of the 8 GPUs of 2 nodes
    submit("--cluster", "h100-hgx", "--ranks-per-node", "8")
    part, whole = seen
    assert whole == toml_file.read("h100-hgx")
    assert (part.node.devices, part.nodes) == (4, whole.nodes)
    assert (part.node.host_w, part.levels[0].devices) == (whole.node.host_w / 2, 4)


@pytest.mark.parametrize("cluster", toml_file.names())
def test_each_part_of_a_node_is_a_cluster(cluster):
    whole = replace(toml_file.read(cluster), fits=())
    for devices in range(1, whole.node.devices + 1):
        part = command._part_of_nodes(whole, devices)
        hardware.validate(part)
        assert (part.node.devices, part.nodes) == (devices, whole.nodes)
        assert part.levels[-1] == whole.levels[-1]
    assert part == whole


def test_jobs_after_another_are_counted(submit):
    told = submit("--cluster", "a100-selene", "--set", "run.steps=100000000", "--time", "1:00:00")[1]
    assert len(told) == 2 and "jobs of 1:00:00 after another" in told[1]
    assert int(told[1].split("that is ")[1].split()[0]) > 2


@pytest.mark.parametrize(
    ("cluster", "said"),
    [("a100-selen", "the nearest is 'a100-selene'"), ("nowhere.toml", "nowhere.toml"), ("workstation", "workstation")],
)
def test_what_cannot_be_planned_is_submitted_all_the_same(cluster, said, submit):
    script, told = submit("--cluster", cluster)  # the workstation has two devices, and there are eight ranks
    assert len(told) == 1 and told[0].startswith("no estimate: ") and said in told[0]
    assert script == submit()[0]


def test_a_fault_of_the_planner_does_not_stop_a_job(submit, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("nothing by nothing")

    monkeypatch.setattr(command, "_estimate_lines", fail)
    assert submit("--cluster", "a100-selene")[1] == ["no estimate: nothing by nothing"]


def test_only_what_does_not_fit_is_loud(submit):
    arguments = ("--set", "model.hidden=65536", "--set", "model.heads=64", "--set", "data.context=4096")
    told = submit("--cluster", "a100-selene", *arguments)[1]
    assert "DOES NOT FIT" in told[0]
    assert (
        told[-1].startswith("warning: ") and "hpcdist plan search RECIPE --cluster a100-selene --devices 8" in told[-1]
    )
    assert not any(line.startswith("warning: ") for line in submit("--cluster", "a100-selene")[1])
