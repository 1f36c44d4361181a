"""`hpcdist jobs` on a real Slurm without accounting: a chain of two, whose first job is asked to save and end.


Needs Debian's slurm-wlm and munge, and root.
"""

import json
import os
import re
import shlex
import sys

import pytest

from hpcdist.batch import ledger

NAME = 'e|vil \x1b[31m\n9|COMPLETED "é" $(touch x)'
SCRIPT = """#!/bin/bash
hpcdist=({python} -P -m hpcdist)
[[ $("${{hpcdist[@]}}" jobs begin {run} --job "$SLURM_JOB_ID" --restart "${{SLURM_RESTART_COUNT:-0}}") == go ]] || exit
code=0
"${{hpcdist[@]}}" train recipe.toml --out {run} --resume auto || code=$?
"${{hpcdist[@]}}" jobs end {run} --job "$SLURM_JOB_ID" --code "$code"
exit "$code"
"""

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("chain")
    (place / "text.txt").write_text("".join(f"{number} is {number * number % 97}, " for number in range(1500)))
    (place / "recipe.toml").write_text(
        "[data]\npath = 'text.txt'\ncontext = 16\n[model]\nlayers = 1\nhidden = 32\nheads = 2\n"
        "[run]\nsteps = 1000000\nglobal_batch = 4\n[checkpoint]\nevery_steps = 20\n"
    )
    return place


def test_jobs_commands_show_stop_and_account_for_a_chain(cluster, folder):
    run, state = folder / "run dir", folder / "state"

    def jobs(*arguments, code=0):
        line = [sys.executable, "-P", "-m", "hpcdist", "jobs", *arguments]
        done = cluster.run("env", f"XDG_STATE_HOME={state}", *line, cwd=folder)
        assert done.returncode == code, f"{arguments}\n{done.stdout}\n{done.stderr}"
        return done.stdout, done.stderr

    def seen(job):
        (row,) = json.loads(jobs("status", job, "--json")[0])["jobs"]
        assert row["job"] == job
        return dict(row)

    def submit(*arguments):
        (folder / "job.sh").write_text(SCRIPT.format(python=shlex.quote(sys.executable), run=shlex.quote(str(run))))
        exported = f"--export=ALL,XDG_STATE_HOME={state},OMP_NUM_THREADS=1"
        line = ["sbatch", "--parsable", exported, f"--job-name={NAME}", "--time=30", "--output=%j.out", *arguments]
        done = cluster.run(*line, "job.sh", cwd=folder)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    first = submit()
    second = submit(f"--dependency=afterany:{first}")
    for job, chain in ((first, [first]), (second, [first, second])):
        ledger.record(run, "submitted", job=job, scheduler="slurm", log=str(folder / f"{job}.out"), chain=chain)
    cluster.wait(lambda: (run / "checkpoints" / "latest").exists(), f"checkpoint of job {first}")

    result = seen(first)
    assert (result["state"], result["nodes"], result["restarts"]) == ("RUNNING", 1, 0)
    assert (result["steps"], result["run_dir"]) == (1000000, str(run))
    assert isinstance(result["checkpoint_step"], int) and result["checkpoint_step"] >= 20
    assert isinstance(result["time_left_s"], float) and 0 < result["time_left_s"] <= 1800
    waits = seen(second)
    assert (waits["state"], waits["reason"]) == ("PENDING", "Dependency")
    table = jobs()[0]  # begin has entered the run in the registry, and the names come from the queue
    assert re.search(rf"^{first} .*RUNNING.*\n{second} .*PENDING \(Dependency\)", table, re.MULTILINE), table
    assert r"e|vil \x1b[31m" in table and "\x1b" not in table
    output, where = jobs("log", first, "-n", "2")
    assert len(output.splitlines()) == 2 and f"{first}.out" in where

    _, done = jobs("cancel", first)
    assert done.index(f"job {second} left the queue") < done.index(f"job {first} saves after its current step and ends")
    cluster.wait(lambda: cluster.job(first)["JobState"] == "FAILED", f"end of job {first}")
    assert (cluster.job(first)["ExitCode"], cluster.job(first)["Requeue"]) == ("75:0", "0")
    assert (cluster.job(second)["JobState"], (run / "stop").exists()) == ("CANCELLED", False)
    assert "is over already (FAILED)" in jobs("cancel", first)[1]
    assert not re.search(rf"^({first}|{second}) ", jobs()[0], re.MULTILINE)
    assert [seen(job)["exit_code"] for job in (first, second)] == [75, None]

    entries = [(entry.event, entry.job) for entry in ledger.read(run)][2:]
    assert entries == [("began", first), ("cancelled", second), ("cancelled", first), ("ended", first)]
    newest = (run / "checkpoints" / "latest").read_text().strip()
    end = ledger.read(run)[-1]
    assert (end.text("word"), end.text("newest"), end.number("code")) == ("stop", newest, 75)
    figures = json.loads(jobs("report", str(run), "--json")[0])
    assert (figures["starts"], figures["failed_starts"], figures["lost_s"]) == (1, 0, 0)
    assert (figures["steps_from"], f"step-{figures['steps_to']}") == (0, newest)
    assert figures["elapsed_by"] == "ledger" and figures["node_hours"] * 3600 == pytest.approx(figures["elapsed_s"])
    assert figures["energy_j"] is None and "accounting storage is disabled" in figures["energy_reason"]
    assert "energy     not known" in jobs("report", first)[0]
    assert not (folder / "x").exists()


def test_jobs_commands_handle_arrays_and_unknown_jobs(cluster, folder):
    """At most two tasks run at once, so an array can only be cancelled immediately."""

    def jobs(*arguments):
        line = [sys.executable, "-P", "-m", "hpcdist", "jobs", *arguments]
        done = cluster.run("env", f"XDG_STATE_HOME={folder / 'state'}", *line, cwd=folder)
        return done.returncode, done.stdout, done.stderr

    line = ["sbatch", "--parsable", "--array=0-3%1", "--job-name=hpcdist-array", "--output=/dev/null"]
    array = cluster.run(*line, "--wrap=sleep 300", cwd=folder).stdout.strip()
    cluster.wait(lambda: '"RUNNING"' in jobs("status", array, "--json")[1], "a task that runs")
    rows = json.loads(jobs("status", "--json")[1])["jobs"]
    assert sorted((row["job"], row["state"]) for row in rows if row["job"].startswith(f"{array}_")) == [
        (f"{array}_0", "RUNNING"),
        (f"{array}_[1-3%1]", "PENDING"),
    ]
    code, _, why = jobs("cancel", array)
    assert code == 2 and "cannot be asked to save" in why and "Nothing was cancelled" in why
    assert jobs("cancel", f"{array}_2")[0] == jobs("cancel", array, "--now")[0] == os.EX_OK
    cluster.wait(lambda: f"{array}_" not in jobs("status")[1], "the end of the array")
    code, _, why = jobs("report", "4711")
    assert code == 78 and "job 4711 is unknown" in why
