"""The estimate of `hpcdist submit`: on stderr, only for known clusters, and never a reason to reject a job."""

from dataclasses import replace

import pytest

from harness.jobs import call_command
from hpcdist.batch import site_search
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
    """A function that renders a job and returns its script and estimate lines. Profiles go into ``sites``."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(site_search.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)

    def run(*arguments, site="slurm-openmpi"):
        words = ["recipe.toml", "--nodes", "2", "--ranks-per-node", "4", "--site", site, "--dry-run"]
        code, out, err = call_command(capsys, "submit", *words, *arguments)
        assert code == 0, err
        return out, [line for line in err.splitlines() if "estimate" in line and "each node" not in line]

    return run


@pytest.fixture
def profile(tmp_path):
    """A function that writes a site profile."""

    def write(cluster):
        folder = tmp_path / "config" / "hpcdist" / "sites"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "mine.toml").write_text(f"based_on = 'slurm-openmpi'\ncluster = '{cluster}'\n")
        return folder

    return write


def test_site_without_a_cluster_shows_no_estimate(submit):
    assert submit()[1] == []


def test_cluster_option_shows_an_estimate(submit):
    script, output = submit("--cluster", "a100-selene")
    assert len(output) == 1
    assert output[0].startswith("estimate: fits: ") and "for 50 steps" in output[0] and "(a100-selene)" in output[0]
    assert script == submit()[0]  # the job itself does not change


def test_cluster_of_the_site_is_used(submit, profile):
    profile("h100-hgx")
    assert "(h100-hgx)" in submit(site="mine")[1][0]
    assert "(a100-selene)" in submit("--cluster", "a100-selene", site="mine")[1][0]


def test_site_show_prints_its_cluster(submit, profile, capsys):
    profile("h100-hgx")
    assert 'cluster = "h100-hgx"\n' in call_command(capsys, "site", "show", "mine")[1]


def test_cluster_file_next_to_the_profile_is_used(submit, profile):
    folder = profile("ours.toml")
    local_data = replace(toml_file.read("a100-selene"), name="ours", devices=16)  # two nodes
    (folder / "ours.toml").write_text(toml_file.dump(local_data))
    assert "(ours)" in submit(site="mine")[1][0]


def test_estimate_covers_the_requested_part_of_a_node(monkeypatch, submit):
    seen = []
    monkeypatch.setattr(plan, "plan_of_subject", lambda subject, on: seen.append(on) or plan_of_subject(subject, on))
    submit("--cluster", "h100-hgx")  # 4 of the 8 GPUs of 2 nodes
    submit("--cluster", "h100-hgx", "--ranks-per-node", "8")
    part, whole = seen
    assert whole == toml_file.read("h100-hgx")
    assert (part.node.devices, part.nodes) == (4, whole.nodes)
    assert (part.node.host_w, part.levels[0].devices) == (whole.node.host_w / 2, 4)


@pytest.mark.parametrize("cluster", toml_file.names())
def test_each_part_of_a_node_is_a_valid_cluster(cluster):
    whole = replace(toml_file.read(cluster), fits=())
    for devices in range(1, whole.node.devices + 1):
        part = command._part_of_nodes(whole, devices)
        hardware.validate(part)
        assert (part.node.devices, part.nodes) == (devices, whole.nodes)
        assert part.levels[-1] == whole.levels[-1]
    assert part == whole


def test_estimate_counts_consecutive_jobs(submit):
    output = submit("--cluster", "a100-selene", "--set", "run.steps=100000000", "--time", "1:00:00")[1]
    assert len(output) == 2 and "consecutive jobs of 1:00:00" in output[1]
    assert int(output[1].split("estimate: ")[1].split()[0]) > 2


@pytest.mark.parametrize(
    ("cluster", "output"),
    [("a100-selen", "the nearest is 'a100-selene'"), ("nowhere.toml", "nowhere.toml"), ("workstation", "workstation")],
)
def test_job_without_a_possible_estimate_is_submitted(cluster, output, submit):
    script, report = submit("--cluster", cluster)  # the workstation has two devices, but there are eight ranks
    assert len(report) == 1 and report[0].startswith("no estimate: ") and output in report[0]
    assert script == submit()[0]


def test_planner_error_does_not_stop_a_job(submit, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("nothing by nothing")

    monkeypatch.setattr(command, "_estimate_lines", fail)
    assert submit("--cluster", "a100-selene")[1] == ["no estimate: nothing by nothing"]


def test_only_an_estimate_that_does_not_fit_warns(submit):
    arguments = ("--set", "model.hidden=65536", "--set", "model.heads=64", "--set", "data.context=4096")
    output = submit("--cluster", "a100-selene", *arguments)[1]
    assert "DOES NOT FIT" in output[0]
    assert (
        output[-1].startswith("warning: ")
        and "hpcdist plan search RECIPE --cluster a100-selene --devices 8" in output[-1]
    )
    assert not any(line.startswith("warning: ") for line in submit("--cluster", "a100-selene")[1])
