"""The energy of jobs, from the recorded output of a real Slurm, with and without PrologFlags=Contain."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.jobs import call_command
from harness.marks import cases
from hpcdist.batch.schedulers import dispatch, slurm_energy
from hpcdist.errors import OK, ConfigurationError
from stubs import slurm_double

JOB = "710"
RECORDED = Path(slurm_double.__file__).with_name("sacct_energy.txt").read_text().split("## ")[1:]
SACCT = dict(part.split("\n", 1) for part in RECORDED)
PARTLY = "includes only the energy of steps on n2, n3"


@pytest.fixture
def account_starts(tmp_path, monkeypatch):
    """``account_starts(rows of sacct)`` returns the starts of the job."""
    for name, value in slurm_double.install(tmp_path).items():
        monkeypatch.setenv(name, value)

    def read_accounts(rows):
        (tmp_path / "accounts").write_text(rows)
        result, why = dispatch.accounts([JOB])
        assert not why
        return result

    return read_accounts


@pytest.fixture
def report(account_starts, capsys):
    """``report(rows of sacct)`` returns the JSON figures and the text of `hpcdist jobs report`."""

    def report_job(rows):
        account_starts(rows)
        messages = []
        for options in (["--json"], []):
            code, out, err = call_command(capsys, "jobs", "report", JOB, *options)
            assert code == OK, err
            messages.append(out)
        return json.loads(messages[0]), messages[1]

    return report_job


@cases(
    "case, joules, lacking",
    # n1 runs mpirun and is only in .batch; the numbered step has the other nodes
    ("plain: mpirun", [1303 + 4013], PARTLY),
    ("contain: mpirun", [7856], ""),  # .extern covers all nodes, all the time
    # .batch already includes n1's share of the step, 800 J
    ("plain: srun", [1211 + 4803 - 800], PARTLY),
    ("contain: srun", [7350], ""),
    # a probe of 0 seconds has no value
    (
        "plain: srun on two",
        [1012 + 2400 - 800],
        "excludes n3, where no step has a value; " + PARTLY.replace(", n3", ""),
    ),
    ("contain: srun on two", [6098], ""),
    # the job row of a requeued start has no value; the steps suffice
    ("contain: requeued", [2466, 2461], ""),
    ("plain: requeued", [411 + 2404 - 400, 411 + 2403 - 401], ""),
)
def test_energy_in_several_steps_is_counted_once(account_starts, case, joules, lacking):
    rows = account_starts(SACCT[case])
    assert [row.energy_j for row in rows] == pytest.approx(joules)
    assert [row.energy_reason for row in rows] == [lacking] * len(joules)


@pytest.mark.parametrize("kind", ["plain", "contain"])
def test_report_of_a_running_job_explains_missing_energy(report, kind):
    figures, text = report(SACCT[f"{kind}: mpirun running"])
    assert figures["energy_j"] is None
    assert f"energy     not known ({slurm_energy.NOT_YET}: see `hpcdist jobs report {JOB}` then)" in text


def test_report_sums_all_starts_of_a_requeued_job(report):
    figures, text = report(SACCT["contain: requeued"])
    assert (figures["energy_j"], figures["energy_reason"]) == (2466 + 2461, None)
    assert "energy     4,927 J\n" in text


def test_report_marks_running_start_next_to_finished_starts(report):
    first = SACCT["contain: requeued"].splitlines()[:4]
    now = SACCT["contain: mpirun running"].splitlines()
    figures, text = report("\n".join([*first, *now, ""]))
    assert figures["energy_j"] == 2466
    assert f"2,466 J (job {JOB}, start 2: excluded: {slurm_energy.NOT_YET}" in text and "then)" in text


def rows_without_energy(rows, step, joules=""):
    """Return the rows with the energy of ``step`` set to ``joules``, and unknown energies of the step's nodes."""
    results = []
    for line in rows.splitlines():
        row = line.split("|")
        if row[0].endswith(step):
            row[7:8], row[9:13] = [joules], [""] * 4
        results.append("|".join(row))
    return "\n".join([*results, ""])


@pytest.mark.parametrize("blank", ["", "0", "18446744073709551614"])
def test_step_without_energy_value_is_named(account_starts, blank):
    (row,) = account_starts(rows_without_energy(SACCT["plain: mpirun"], ".0", blank))
    assert row.energy_j == 1303
    assert row.energy_reason == "excludes step 0 (8 s on n2, n3), which has no value"
    (row,) = account_starts(rows_without_energy(SACCT["plain: mpirun"], ".batch", blank))
    assert row.energy_j == 4013 and "excludes step batch (13 s on n1), which has no value" in row.energy_reason


def test_other_steps_are_used_if_extern_has_no_value(account_starts):
    (row,) = account_starts(rows_without_energy(SACCT["contain: mpirun"], ".extern"))
    assert row.energy_j == 1303 + 3999
    assert row.energy_reason == "excludes step extern (14 s on n2, n3), which has no value"


def test_running_step_is_named(account_starts):
    rows = SACCT["plain: mpirun"].replace("|8|2|0:0|1795447572|1795447580|4013|", "|8|2|0:0|1795447572|Unknown|0|")
    (row,) = account_starts(rows)
    assert row.energy_j == 1303 and row.energy_reason == "excludes step 0, which has not ended"


def test_node_without_energy_value_is_named(account_starts):
    (row,) = account_starts(SACCT["contain: mpirun"].replace("energy=1308,", "energy=0,"))
    assert row.energy_j == 7856 and row.energy_reason == "excludes n1, which measured no energy"


def test_energy_is_unknown_if_no_step_has_a_value(account_starts):
    rows = SACCT["contain: mpirun"]
    for step in (".batch", ".extern", ".0"):
        rows = rows_without_energy(rows, step)
    (row,) = account_starts(rows)
    assert (row.energy_j, row.energy_reason) == (None, slurm_energy.NOT_MEASURED)


def test_crashed_node_is_named_as_missing_energy(account_starts):
    (row,) = account_starts(SACCT["contain: mpirun"].replace("710|COMPLETED", "710|NODE_FAIL"))
    assert row.energy_j == 7856 and row.energy_reason == "excludes the energy of a crashed node"


def test_probe_within_a_step_is_not_counted_twice():
    job = slurm_energy.AccountedStep("", "COMPLETED", 0, 100, ("n1", "n2"), None)
    long = slurm_energy.AccountedStep("0", "COMPLETED", 0, 100, ("n1", "n2"), 1000.0)
    probe = slurm_energy.AccountedStep("1", "COMPLETED", 50, 60, ("n1", "n2"), 100.0)
    later = slurm_energy.AccountedStep("2", "COMPLETED", 90, 120, ("n2",), 60.0)
    assert slurm_energy.of_start(job, [probe, long]) == slurm_energy.AccountedEnergy(1000.0)
    assert slurm_energy.of_start(job, [long, later]).joules == pytest.approx(1000 + 60 * 20 / 30)


@cases(
    "text, names",
    ("n1", ("n1",)),
    ("n[1-3],m7", ("n1", "n2", "n3", "m7")),
    ("nid[001008-001010,002000]", ("nid001008", "nid001009", "nid001010", "nid002000")),
    ("x[0-1]c[2-3]n", ("x0c2n", "x0c3n", "x1c2n", "x1c3n")),
    ("None assigned", ()),
    ("", ()),
)
def test_hostlist_is_expanded(text, names):
    assert slurm_energy.expand_hostlist(text) == names


@pytest.mark.parametrize("text", ["n[1-", "n[1-2]]", "n[]", "n[1-,2]", "n1,,n2", "n[a]"])
def test_malformed_host_list_is_rejected(text):
    with pytest.raises(ConfigurationError, match="is not a Slurm host list"):
        slurm_energy.expand_hostlist(text)


_TIMES = st.integers(0, 60)
_STEPS = st.builds(
    lambda name, begin, length, nodes, joules: slurm_energy.AccountedStep(
        name, "COMPLETED", 1000 + begin, 1000 + begin + length, tuple(f"n{node}" for node in nodes), joules
    ),
    name=st.sampled_from(["batch", "extern", "0", "1"]),
    begin=_TIMES,
    length=_TIMES,
    nodes=st.lists(st.integers(1, 4), min_size=1, max_size=4, unique=True),
    joules=st.none() | st.floats(1, 1e6),
)


@given(steps=st.lists(_STEPS, min_size=1, max_size=6))
def test_energy_is_positive_and_at_most_the_sum_of_steps(steps):
    job = slurm_energy.AccountedStep("", "COMPLETED", 1000, 1120, ("n1", "n2", "n3", "n4"), None)
    result = slurm_energy.of_start(job, steps)
    booked = [step.joules for step in steps if step.joules is not None]
    if not booked:
        assert result == slurm_energy.AccountedEnergy(None, slurm_energy.NOT_MEASURED)
    else:
        assert result.joules is not None and 0 < result.joules <= math.fsum(booked) * (1 + 1e-9)
