"""Any text in a name, path, recipe or option is data to every parser that reads it, and never code.

bash itself reads each script; the directives are read as sbatch reads them.
"""

import dataclasses
import os
import shlex
import subprocess

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from harness.job_scripts import PLAIN
from harness.jobs import LIMIT_S
from hpcdist.batch import site_search, submission
from hpcdist.errors import ConfigurationError, UsageError

GENERIC = site_search.load("slurm-mpich")

# Characters that break parsers, and any text that an argument can hold: no zero byte, no lone surrogate.
HOSTILE = (
    st.lists(
        st.one_of(
            st.sampled_from(
                ["$(touch x)", "`touch x`", "${x:=y}", "'", '"', "\\", "\n", "#", "\n#SBATCH --wrap=x\n", " ", "%s"]
            ),
            st.sampled_from(
                ["{{ job }}", "{% raw %}", "{#", "!!", "~", "*", "\nEOF\n", "'; touch x; '", "\x1b[2J", "&", "|"]
            ),
            st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=4),
        ),
        min_size=1,
        max_size=4,
    )
    .map("".join)
    .filter(bool)
)

# Plays python -P -m hpcdist, and starts with the commands of every job.
PYTHON = """#!/bin/bash
case " $* " in *" jobs begin "*) echo go ;; *" jobs end "*) echo stop ;; esac
printf '%s\\0' "$@" "$PYTHONPATH" "$VALUE" --end-of-call-- >> "$KEPT"
"""


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.full
def test_bash_reads_hostile_values_unchanged(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("job")
    (folder / "python").write_text(PYTHON)
    (folder / "python").chmod(0o755)
    draw = {name: data.draw(HOSTILE, name) for name in ("recipe", "run_dir", "mpi_args", "word", "path", "value")}
    environment = dataclasses.replace(GENERIC.environment, variables={"VALUE": draw["value"]})
    job = dataclasses.replace(
        PLAIN,
        python=str(folder / "python"),
        recipe=draw["recipe"] + "\n",
        run_dir=folder / ("in " + draw["run_dir"].replace("/", " "))[:60],
        mpi_args=draw["mpi_args"],
        python_of_ranks=(draw["word"],),
        python_path=draw["path"],
    )
    text = submission.render(job, dataclasses.replace(GENERIC, environment=environment))
    (folder / "job").write_bytes(os.fsencode(submission.script_with_input(job, text)))
    done = subprocess.run(
        ["bash", "job"],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", "KEPT": str(folder / "kept")},
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    calls = [call.split("\0")[:-1] for call in os.fsdecode((folder / "kept").read_bytes()).split("--end-of-call--\0")]
    trained = next(call for call in calls if "train" in call)
    assert trained[trained.index("--out") + 1] == str(job.run_dir)
    assert trained[trained.index("--mpi-args") + 1] == draw["mpi_args"]
    assert trained[trained.index("--python") + 1] == shlex.quote(draw["word"])
    assert trained[-2:] == [draw["path"], draw["value"]]
    assert job.input_file.read_bytes() == os.fsencode(job.recipe) and list(job.run_dir.iterdir()) == [job.input_file]
    assert {path.name for path in folder.iterdir()} == {"python", "kept", "job", job.run_dir.name}, (
        "nothing was executed"
    )


@settings(max_examples=60)
@given(HOSTILE, st.sampled_from(["name", "partition", "account", "sbatch_args", "option", "site"]))
def test_hostile_directive_is_one_option_or_rejected(value, field):
    site = GENERIC
    job = PLAIN
    if field == "site":
        site = dataclasses.replace(site, name=value)
    elif field == "option":
        site = dataclasses.replace(site, scheduler=dataclasses.replace(site.scheduler, options=(f"--comment={value}",)))
    else:
        job = dataclasses.replace(job, **{field: (f"--comment={value}",) if field == "sbatch_args" else value})
    try:
        text = submission.render(job, site)
    except (UsageError, ConfigurationError):
        assert not value.isprintable()
        return
    plain = submission.render(PLAIN, GENERIC)
    assert len(text.splitlines()) - len(plain.splitlines()) == {"name": 0, "account": 0, "site": 0}.get(field, 1)
    before = [line for line in plain.splitlines() if not line.startswith("#")]
    assert [line for line in text.splitlines() if not line.startswith("#")] == before
