"""The joules of jobs, of what a real Slurm printed of mpirun and srun jobs, with and without PrologFlags=Contain."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.jobs import called
from harness.marks import cases
from hpcdist.batch.schedulers import dispatch
from hpcdist.batch.schedulers.slurm import energy
from hpcdist.errors import OK, ConfigurationError
from stubs import slurm_double

JOB = "710"
RECORDED = Path(slurm_double.__file__).with_name("sacct_energy.txt").read_text().split("## ")[1:]
SACCT = dict(part.split("\n", 1) for part in RECORDED)
PARTLY = "of n2, n3 only what steps used there"


@pytest.fixture
def accounted(tmp_path, monkeypatch):
    """``accounted(rows of sacct)`` -> the starts of the job."""
    for name, value in slurm_double.install(tmp_path).items():
        monkeypatch.setenv(name, value)

    def look(rows):
        (tmp_path / "accounts").write_text(rows)
        found, why = dispatch.accounts([JOB])
        assert not why
        return found

    return look


@pytest.fixture
def report(accounted, capsys):
    """``report(rows of sacct)`` -> the figures and the text of `hpcdist jobs report`."""

    def call(rows):
        accounted(rows)
        said = []
        for options in (["--json"], []):
            code, out, err = called(capsys, "jobs", "report", JOB, *options)
            assert code == OK, err
            said.append(out)
        return json.loads(said[0]), said[1]

    return call


@cases(
    "case, joules, lacking",
    # n1, where mpirun itself runs, is in .batch alone; the numbered step has the others
    ("plain: mpirun", [1303 + 4013], PARTLY),
    ("contain: mpirun", [7856], ""),  # .extern is on all nodes, all the time
    # of the step, n1 is in .batch already: 800 J of it
    ("plain: srun", [1211 + 4803 - 800], PARTLY),
    ("contain: srun", [7350], ""),
    # a probe of no second has no value
    ("plain: srun on two", [1012 + 2400 - 800], "without n3, where no step has a value; " + PARTLY.replace(", n3", "")),
    ("contain: srun on two", [6098], ""),
    # the figure of the job itself is empty for a start that was requeued, and is not needed
    ("contain: requeued", [2466, 2461], ""),
    ("plain: requeued", [411 + 2404 - 400, 411 + 2403 - 401], ""),
)
def test_what_is_in_several_steps_counts_once(accounted, case, joules, lacking):
    rows = accounted(SACCT[case])
    assert [row.energy_j for row in rows] == pytest.approx(joules)
    assert [row.energy_reason for row in rows] == [lacking] * len(joules)


@pytest.mark.parametrize("kind", ["plain", "contain"])
def test_the_report_inside_a_job_says_when_and_how_its_joules_are_seen(report, kind):
    figures, text = report(SACCT[f"{kind}: mpirun running"])
    assert figures["energy_j"] is None
    assert f"energy     not known ({energy.NOT_YET}: see `hpcdist jobs report {JOB}` then)" in text


def test_all_starts_of_a_requeued_job_count(report):
    figures, text = report(SACCT["contain: requeued"])
    assert (figures["energy_j"], figures["energy_reason"]) == (2466 + 2461, None)
    assert "energy     4,927 J\n" in text


def test_a_start_that_runs_is_said_beside_those_that_are_over(report):
    first = SACCT["contain: requeued"].splitlines()[:4]
    now = SACCT["contain: mpirun running"].splitlines()
    figures, text = report("\n".join([*first, *now, ""]))
    assert figures["energy_j"] == 2466
    assert f"2,466 J (job {JOB}, start 2: without all of it: {energy.NOT_YET}" in text and "then)" in text


def without(rows, step, joules=""):
    """The rows where the joules of ``step`` are ``joules``, and those of its nodes unknown."""
    found = []
    for line in rows.splitlines():
        row = line.split("|")
        if row[0].endswith(step):
            row[7:8], row[9:13] = [joules], [""] * 4
        found.append("|".join(row))
    return "\n".join([*found, ""])


@pytest.mark.parametrize("blank", ["", "0", "18446744073709551614"])
def test_a_step_without_a_value_is_named(accounted, blank):
    (row,) = accounted(without(SACCT["plain: mpirun"], ".0", blank))
    assert row.energy_j == 1303
    assert row.energy_reason == "without step 0 (8 s on n2, n3), which has no value"
    (row,) = accounted(without(SACCT["plain: mpirun"], ".batch", blank))
    assert row.energy_j == 4013 and "without step batch (13 s on n1), which has no value" in row.energy_reason


def test_where_extern_has_no_value_the_other_steps_have(accounted):
    (row,) = accounted(without(SACCT["contain: mpirun"], ".extern"))
    assert row.energy_j == 1303 + 3999
    assert row.energy_reason == "without step extern (14 s on n2, n3), which has no value"


def test_a_step_that_has_not_ended_is_named(accounted):
    rows = SACCT["plain: mpirun"].replace("|8|2|0:0|1795447572|1795447580|4013|", "|8|2|0:0|1795447572|Unknown|0|")
    (row,) = accounted(rows)
    assert row.energy_j == 1303 and row.energy_reason == "without step 0, which has not ended"


def test_a_node_without_a_value_is_named(accounted):
    (row,) = accounted(SACCT["contain: mpirun"].replace("energy=1308,", "energy=0,"))
    assert row.energy_j == 7856 and row.energy_reason == "without n1, which has measured none"


def test_nothing_is_measured_where_no_step_has_a_value(accounted):
    rows = SACCT["contain: mpirun"]
    for step in (".batch", ".extern", ".0"):
        rows = without(rows, step)
    (row,) = accounted(rows)
    assert (row.energy_j, row.energy_reason) == (None, energy.NOT_MEASURED)


def test_a_crashed_node_takes_its_joules_along(accounted):
    (row,) = accounted(SACCT["contain: mpirun"].replace("710|COMPLETED", "710|NODE_FAIL"))
    assert row.energy_j == 7856 and row.energy_reason == "without what a node had used when it crashed"


def test_a_probe_beside_a_step_is_in_it_already():
    job = energy.AccountedStep("", "COMPLETED", 0, 100, ("n1", "n2"), None)
    long = energy.AccountedStep("0", "COMPLETED", 0, 100, ("n1", "n2"), 1000.0)
    probe = energy.AccountedStep("1", "COMPLETED", 50, 60, ("n1", "n2"), 100.0)
    later = energy.AccountedStep("2", "COMPLETED", 90, 120, ("n2",), 60.0)
    assert energy.of_start(job, [probe, long]) == energy.AccountedEnergy(1000.0)
    assert energy.of_start(job, [long, later]).known == pytest.approx(1000 + 60 * 20 / 30)


@cases(
    "text, names",
    ("n1", ("n1",)),
    ("n[1-3],m7", ("n1", "n2", "n3", "m7")),
    ("nid[001008-001010,002000]", ("nid001008", "nid001009", "nid001010", "nid002000")),
    ("x[0-1]c[2-3]n", ("x0c2n", "x0c3n", "x1c2n", "x1c3n")),
    ("None assigned", ()),
    ("", ()),
)
def test_names_of_nodes(text, names):
    assert energy.expand_hostlist(text) == names


@pytest.mark.parametrize("text", ["n[1-", "n[1-2]]", "n[]", "n[1-,2]", "n1,,n2", "n[a]"])
def test_malformed_host_list_is_rejected(text):
    with pytest.raises(ConfigurationError, match="is no host list of Slurm"):
        energy.expand_hostlist(text)


_TIMES = st.integers(0, 60)
_STEPS = st.builds(
    lambda name, begin, length, nodes, joules: energy.AccountedStep(
        name, "COMPLETED", 1000 + begin, 1000 + begin + length, tuple(f"n{node}" for node in nodes), joules
    ),
    name=st.sampled_from(["batch", "extern", "0", "1"]),
    begin=_TIMES,
    length=_TIMES,
    nodes=st.lists(st.integers(1, 4), min_size=1, max_size=4, unique=True),
    joules=st.none() | st.floats(1, 1e6),
)


@given(steps=st.lists(_STEPS, min_size=1, max_size=6))
def test_no_more_is_counted_than_was_booked_and_no_less_than_the_most(steps):
    job = energy.AccountedStep("", "COMPLETED", 1000, 1120, ("n1", "n2", "n3", "n4"), None)
    found = energy.of_start(job, steps)
    booked = [step.joules for step in steps if step.joules is not None]
    if not booked:
        assert found == energy.AccountedEnergy(None, energy.NOT_MEASURED)
    else:
        assert found.known is not None and 0 < found.known <= math.fsum(booked) * (1 + 1e-9)
