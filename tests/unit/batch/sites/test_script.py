"""The rendered script: compared with golden files, quoted for two parsers, and run by bash with played commands.

To accept an intended change: HPCDIST_ACCEPT_GOLDEN=1 pytest tests/unit/batch/sites/test_script.py, and check the diff.
"""

import dataclasses
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import jinja2
import pytest

from harness import jobs
from harness.job_scripts import (
    EVIL,
    PLAIN,
    RECIPE,
    check_by_bash,
    check_golden,
    recorded_arguments,
    signal_when_ready,
    start_script,
    stub_python,
    wait_for_end,
    write_stub_commands,
)
from harness.marks import cases
from hpcdist.batch import job as batch_job
from hpcdist.batch import site_search, submission
from hpcdist.batch.array import ScriptArrayJob
from hpcdist.errors import ConfigurationError, UsageError

GENERIC = site_search.load("slurm-openmpi")
GPUS = dataclasses.replace(PLAIN, gpus_per_node=4)
# Name -> profile, job: each profile of a Slurm site, and options that only some jobs have.
JOBS = {
    **{name: (name, GPUS) for name in ("slurm-openmpi", "slurm-mpich", "cray", "parastation", "ibrun")},
    **{name: (name, GPUS) for name in ("perlmutter", "juwels-booster", "alps")},
    "perlmutter-cpu": ("perlmutter-cpu", PLAIN),
    "lumi": ("lumi", dataclasses.replace(PLAIN, partition="standard-g", cpus_per_task=14)),
    "leonardo": ("leonardo", dataclasses.replace(GPUS, mem="494000", qos="boost_qos_dbg")),
    "marenostrum5": ("marenostrum5", dataclasses.replace(GPUS, qos="acc_ehpc", cpus_per_task=20)),
    "frontier": (
        "frontier",
        dataclasses.replace(
            PLAIN, environment=Path("/lustre/orion/project/env.tar"), local=Path("/mnt/bb/me/hpcdist-1000-1a2b3c4d")
        ),
    ),
    "plain": ("slurm-openmpi", dataclasses.replace(PLAIN, account=None, check=False)),
    "chain": ("slurm-mpich", dataclasses.replace(PLAIN, link=1, links=3)),
    "last link": ("slurm-mpich", dataclasses.replace(PLAIN, link=3, links=3)),
    "staged": (
        "slurm-mpich",
        dataclasses.replace(
            PLAIN,
            environment=Path("/scratch/me/env.tar"),
            data=Path("/scratch/text"),
            local=Path("/tmp/hpcdist-1000-1a2b3c4d"),
            warmup=True,
        ),
    ),
    "program": ("slurm-mpich", dataclasses.replace(PLAIN, recipe="", program=("python", "train.py", "--lr=1"))),
    "container": (
        "cray",
        dataclasses.replace(GPUS, python_of_ranks=("apptainer", "exec", "--nv", "a b.sif", "python3")),
    ),
    "full": (
        "slurm-openmpi",
        dataclasses.replace(
            PLAIN,
            name="GPT of a thesis",
            partition="gpu",
            account="project_1",
            qos="a b",
            constraint="gpu&hbm80g",
            mem="200G",
            signal_s=600,
            recipe="[data]\npath = \"/scratch/me/a 'new' $text\"\n",
            run_dir=Path("/scratch/me/runs/gpt"),
            sbatch_args=("--switches=1", "--mail-user=me@example.org", "--comment=a # b"),
            mpi_args="--report-bindings",
            gpus_per_node=2,
            python_path="/home/me/hpcdist",
            restarts=3,
            spare_nodes=1,
            survive="shrink",
        ),
    ),
}


def rendered_script(name):
    profile, job = JOBS[name]
    return submission.render(job, site_search.load(profile))


@pytest.mark.parametrize("name", JOBS)
def test_scripts_match_golden_files(name):
    folder = "sites" if name == JOBS[name][0] else "train"
    check_golden(rendered_script(name), f"{folder}/train-{name.replace(' ', '-')}.sbatch")


@pytest.mark.full
def test_scripts_pass_bash_and_shellcheck(tmp_path):
    paths = [tmp_path / f"{name}.sh" for name in JOBS]
    for path in paths:
        path.write_text(rendered_script(path.stem))
    check_by_bash(*paths)


def test_templates_filter_every_value():
    seen = 0
    for path in batch_job.folder(batch_job.TEMPLATES).glob("*.j2"):
        for line in path.read_text().splitlines():
            for value in re.findall(r"\{\{.*?\}\}", line):
                if re.fullmatch(r"\{\{ (super\(\)|self\.\w+\(\) \| trim \| indent\(\d\)) \}\}", value):
                    continue  # a block
                kind = "directive" if line.startswith("#SBATCH") else "pbs" if line.startswith("#PBS") else "comment"
                kind = kind if line.startswith("#") else "variable" if value.startswith("{{ name |") else "sh"
                if line.startswith("  say "):
                    assert re.fullmatch(r"\{\{ job\.links? \}\}", value), line  # numbers
                else:
                    assert value.endswith(f"| {kind} }}}}"), (path.name, line)
                seen += 1
    assert seen > 40


def test_unknown_template_name_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="partitoin"):
        submission.environment().from_string("{{ job.partitoin | sh }}").render(job=PLAIN)


@pytest.mark.parametrize("value", ["debug", "a b", EVIL, "", "é", "'", '"', "\\", "a=b,c:d@e%f+g"])
def test_directive_is_one_word_for_sbatch(value):
    assert sbatch_words(f"--comment={submission.directive(value)} # a comment") == [f"--comment={value}"]


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\0b", "\x1b[31m", "a\u2028b", "a\tb"])
def test_control_characters_in_directives_are_rejected(value):
    with pytest.raises(UsageError, match="an #SBATCH line cannot contain"):
        submission.render(dataclasses.replace(PLAIN, name=value), GENERIC)
    with pytest.raises(UsageError, match="an #SBATCH line cannot contain"):
        submission.render(dataclasses.replace(PLAIN, sbatch_args=(f"--comment={value}",)), GENERIC)


def sbatch_words(line):
    """Split a directive like sbatch does (checked against Slurm in tests/launch/slurm/test_batch.py)."""
    words, word, quote, characters = [], "", "", iter(line)
    for character in characters:
        if character == "\\":
            word += next(characters)
        elif quote:
            word, quote = (word, "") if character == quote else (word + character, quote)
        elif character in "'\"":
            quote = character
        elif character == "#":
            break
        elif character.isspace():
            words, word = [*words, word] if word else words, ""
        else:
            word += character
    return [*words, word] if word else words


PYTHON = stub_python(
    """
  *" jobs begin "*) printf '%s\\0' "$@" > began; [[ -z ${REFUSED:-} ]] || exit 78; echo "${BEGIN:-go}"; exit ;;
  *" jobs end "*) printf '%s\\0' "$@" > ended; echo "${END:-stop}"; exit "${BROKEN:-0}" ;;
  *" jobs report "*) touch reported; exit 1 ;;
  *" doctor "*) printf '%s\\0' "$@" > examined; echo >> examinations
    (($(wc -l < examinations) > ${ILL_TIMES:-9})) || exit "${ILL:-0}"; exit 0 ;;
"""
)
# The steps that wait for the end of the job end immediately.
SRUN = """#!/bin/bash
[[ $* != *" --job-name=preemption "* ]] || exit 0
while [[ $1 == -* ]]; do shift; done
[[ $* != *"echo ready"* ]] || exec echo ready
exec "$@"
"""
SCONTROL = """#!/bin/bash
echo "$@" > requeued
exit "${REFUSE:-0}"
"""


@pytest.fixture
def start_job(tmp_path):
    write_stub_commands(tmp_path, python=PYTHON, scontrol=SCONTROL)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    return lambda job=PLAIN, site=GENERIC, **environment: start_script(tmp_path, job, site, slurm | environment)


def test_shell_metacharacters_are_passed_unchanged(start_job, tmp_path):
    recipe = f"data.path = {EVIL}\nEOF\n#SBATCH --nodes=7\n%s %d \\n {{{{ job }}}}\n"
    job = dataclasses.replace(PLAIN, recipe=recipe, run_dir=tmp_path / EVIL, mpi_args=EVIL, python_of_ranks=(EVIL, "b"))
    site = dataclasses.replace(GENERIC, environment=dataclasses.replace(GENERIC.environment, variables={"A": EVIL}))
    code, errors = wait_for_end(
        start_job(dataclasses.replace(job, name=EVIL, account=EVIL, python_path=EVIL), site, CODE="0")
    )
    assert code == 0, errors
    run = [*("-P", "-m", "hpcdist", "run", "-n", "8", "--launcher", "mpirun", "--ranks-per-node", "4")]
    run += ["--cpus-per-task", "8"]
    run += ["--python", shlex.join((EVIL, "b")), "--mpi-args", EVIL]
    doctor = ["doctor", "--job", "--out", str(tmp_path / EVIL), "--device", "cpu", "--recipe", str(job.input_file)]
    assert recorded_arguments(tmp_path / "examined") == [*run, *doctor]
    train = ["train", str(job.input_file), "--out", str(tmp_path / EVIL), "--resume", "auto"]
    assert recorded_arguments(tmp_path / "arguments") == [*run, *train]
    about = [str(tmp_path / EVIL), "--job", "7", "--restart", "0"]
    assert recorded_arguments(tmp_path / "began")[5:10] == about
    assert recorded_arguments(tmp_path / "ended")[5:] == [*about, "--code", "0"]
    assert job.input_file.read_text() == recipe
    assert not (tmp_path / "x").exists() and not (tmp_path / "y").exists()


@pytest.mark.full
def test_restarts_and_survive_are_passed_to_hpcdist_run(start_job, tmp_path):
    job = dataclasses.replace(PLAIN, restarts=2, survive="replace", mpi_args="-v")
    assert wait_for_end(start_job(job, CODE="3"))[0] == 3
    result = recorded_arguments(tmp_path / "arguments")
    output = "--ranks-per-node 4 --cpus-per-task 8 --mpi-args -v --restarts 2 --survive replace"
    assert output in " ".join(result[: result.index("train")])
    assert "--restarts" not in recorded_arguments(tmp_path / "examined")


@pytest.mark.parametrize("tasks", [0, 3])
def test_program_is_started_with_its_run_directory(start_job, tmp_path, tasks):
    local_values = {"recipe": "", "program": ("python", EVIL, "--", "-x"), "restarts": 2, "run_dir": tmp_path / EVIL}
    job, task = dataclasses.replace(PLAIN, **local_values), {}
    if tasks:
        values = {item.name: getattr(job, item.name) for item in dataclasses.fields(job)}
        job = ScriptArrayJob(**values, tasks=tasks, at_most=2)
        task = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "2"}
    assert ("#SBATCH --array=0-2%2\n" in submission.render(job, GENERIC)) is bool(tasks)
    code, errors = wait_for_end(start_job(job, CODE="0", HPCDIST_SET__RUN__STEPS="9", **task))
    assert code == 0, errors
    result = recorded_arguments(tmp_path / "arguments")
    run_dir = str(tmp_path / EVIL / "task-2" if tasks else tmp_path / EVIL)
    messages = ["--restarts", "2", "--out", run_dir, "--resume", "auto", "--", "python", EVIL, "--", "-x"]
    assert result[result.index("--restarts") :] == messages
    assert (tmp_path / "variables").read_text() == "HPCDIST_SET__RUN__STEPS=9\n", "the script must get the variables"
    began = recorded_arguments(tmp_path / "began")
    assert began[5:10] == [run_dir, "--job", "6_2" if tasks else "7", "--restart", "0"]
    assert began[10:12] == ["--program", shlex.join(job.program)]
    assert not (tmp_path / "x").exists() and not (tmp_path / "y").exists()


def test_tasks_on_one_node_have_separate_copies(start_job, tmp_path):
    """A task removes its copies when it starts and ends, while another task on the node may be using its own."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(PYTHON)
    (tmp_path / "bin" / "python").chmod(0o755)
    subprocess.run(["tar", "-cf", "env.tar", "bin"], cwd=tmp_path, check=True)
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    others = [tmp_path / f"local{end}" / "environment" for end in ("", "-1")]
    for folder in others:
        folder.mkdir(parents=True)
    local_values = {
        "recipe": "",
        "program": ("python", "x.py"),
        "run_dir": tmp_path / "runs",
        "local": tmp_path / "local",
    }
    job = dataclasses.replace(PLAIN, **local_values, environment=tmp_path / "env.tar")
    job = ScriptArrayJob(**{item.name: getattr(job, item.name) for item in dataclasses.fields(job)}, tasks=3)
    task = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "n"}
    code, errors = wait_for_end(start_job(job, CODE="0", **task))
    assert code == 0, errors
    result = recorded_arguments(tmp_path / "arguments")
    assert result[result.index("--python") + 1] == f"{tmp_path}/local-2/environment/bin/python"
    assert all(folder.is_dir() for folder in others) and not (tmp_path / "local-2").exists()


def test_job_variables_do_not_change_the_recipe(start_job, tmp_path):
    code, errors = wait_for_end(start_job(CODE="0", HPCDIST_SET__RUN__STEPS="9", HPCDIST_SET__RUN__SEED="a b"))
    assert (code, (tmp_path / "variables").read_text()) == (0, ""), errors
    (written,) = (tmp_path / "run").iterdir()
    assert written == dataclasses.replace(PLAIN, run_dir=tmp_path / "run").input_file and written.read_text() == RECIPE


def test_recipe_is_read_from_the_run_directory(start_job, tmp_path):
    """The output of --dry-run writes the recipe there. An existing recipe stays unchanged."""
    (tmp_path / "run").mkdir()
    dataclasses.replace(PLAIN, run_dir=tmp_path / "run").input_file.write_text("as it was submitted")
    assert wait_for_end(start_job(CODE="0"))[0] == 0
    (written,) = (tmp_path / "run").iterdir()
    assert written.read_text() == "as it was submitted"


def test_missing_or_unwritable_recipe_ends_the_job(start_job, tmp_path):
    (tmp_path / "run").touch()
    code, errors = wait_for_end(start_job(CODE="0"))
    assert code == 1 and "run" in errors and not (tmp_path / "arguments").exists()
    (tmp_path / "run").unlink()
    job = dataclasses.replace(PLAIN, run_dir=tmp_path / "run")
    (tmp_path / "job.sh").write_text(submission.render(job, GENERIC))
    done = jobs.run(["bash", "job.sh"], env=os.environ | {"SLURM_JOB_ID": "7"}, cwd=tmp_path)
    assert done.returncode == 74 and f"{job.input_file} is missing" in done.stderr
    assert not list((tmp_path / "run").iterdir()) and not (tmp_path / "arguments").exists()


@pytest.mark.full
def test_failed_doctor_ends_the_job_and_counts_as_a_start(start_job, tmp_path):
    code, errors = wait_for_end(start_job(CODE="0", ILL="1"))
    assert code == 1 and "--no-check" in errors
    assert (tmp_path / "began").exists() and not (tmp_path / "arguments").exists()
    assert recorded_arguments(tmp_path / "ended")[-1] == "1"


@pytest.mark.parametrize("restart", [0, 1])
@pytest.mark.full
def test_doctor_is_retried_only_after_a_requeue(start_job, tmp_path, restart):
    code, errors = wait_for_end(start_job(CODE="0", ILL="1", ILL_TIMES="1", SLURM_RESTART_COUNT=str(restart)))
    assert (code, (tmp_path / "arguments").exists()) == (1 - restart, bool(restart)), errors
    assert len((tmp_path / "examinations").read_text()) == 1 + restart


@pytest.mark.parametrize(("given", "code"), [({"BEGIN": "done"}, 0), ({"REFUSED": "1"}, 78)])
def test_complete_or_stuck_run_is_not_trained(start_job, tmp_path, given, code):
    assert wait_for_end(start_job(CODE="0", **given))[0] == code
    assert (tmp_path / "began").exists() and not (tmp_path / "arguments").exists()
    assert not (tmp_path / "examined").exists(), "the job must not run steps on other nodes"


@pytest.mark.parametrize("code", ["0", "1", "69", "78", "130"])
@pytest.mark.full
def test_other_codes_are_passed_on(start_job, tmp_path, code):
    assert wait_for_end(start_job(CODE=code))[0] == int(code)
    assert not (tmp_path / "requeued").exists() and (tmp_path / "reported").exists()
    assert recorded_arguments(tmp_path / "ended")[-1] == code


def test_unfinished_job_is_requeued(start_job, tmp_path):
    code, errors = wait_for_end(start_job(CODE="75", END="again"))
    assert (code, (tmp_path / "requeued").read_text()) == (75, "requeue 7\n"), errors
    assert not (tmp_path / "reported").exists()


@pytest.mark.parametrize("given", [{}, {"END": "again", "BROKEN": "1"}])
@pytest.mark.full
def test_other_jobs_are_not_requeued(start_job, tmp_path, given):
    assert wait_for_end(start_job(CODE="75", **given))[0] == 75
    assert not (tmp_path / "requeued").exists()


def test_failed_requeue_explains_how_to_resume(start_job):
    code, errors = wait_for_end(start_job(CODE="75", END="again", REFUSE="1"))
    assert code == 75 and "submit again with --out" in errors


@pytest.mark.parametrize(("link", "code", "output"), [(1, 0, "the next one goes on"), (3, 75, "was the last one")])
@pytest.mark.full
def test_chain_link_leaves_the_rest_to_the_next_link(start_job, tmp_path, link, code, output):
    result, errors = wait_for_end(start_job(dataclasses.replace(PLAIN, link=link, links=3), CODE="75", END="again"))
    assert result == code and (f"link {link} of 3" in errors or link == 3), errors
    assert not (tmp_path / "requeued").exists() and output in errors


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_signals_reach_the_launcher_and_only_walltime_requeues(start_job, tmp_path, number, requeued):
    process = start_job(END="again")
    signal_when_ready(process, tmp_path, number)
    code, errors = wait_for_end(process)
    assert (code, (tmp_path / "told").read_text().strip()) == (75, number.name.removeprefix("SIG")), errors
    assert (tmp_path / "requeued").exists() == requeued


@pytest.mark.full
def test_job_cancelled_during_its_end_is_not_requeued(start_job, tmp_path):
    """Nodes are probed at this point for up to a minute, and the trap waits for the probe."""
    (tmp_path / "python").write_text(PYTHON.replace("> ended;", "> ended; kill -TERM $PPID; sleep 0.3;"))
    code, errors = wait_for_end(start_job(CODE="0", ILL="1", END="again"))
    assert code == 1 and "SIGTERM" in errors and not (tmp_path / "requeued").exists(), errors


def test_training_is_not_started_after_a_signal(start_job, tmp_path):
    """The walltime signals only once, so a later start would run until it is killed."""
    job = dataclasses.replace(PLAIN, check=False)
    (tmp_path / "python").write_text(PYTHON.replace("> began;", "> began; kill -USR1 $PPID; sleep 0.3;"))
    code, errors = wait_for_end(start_job(job, CODE="0"))
    assert (code, "SIGUSR1" in errors, (tmp_path / "arguments").exists()) == (75, True, False), errors
    assert recorded_arguments(tmp_path / "ended")[-1] == "75"


def test_ranks_use_gpus_in_site_order():
    """A program on the node sets the order, because Slurm sets CUDA_VISIBLE_DEVICES of each rank after the script."""
    cray = site_search.load("cray")
    output = "--python 'env CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=3,2,1,0 "
    assert f"{output}{PLAIN.python}'" in submission.render(GPUS, cray)
    image = dataclasses.replace(GPUS, python_of_ranks=("apptainer", "exec", "i.sif", "python3"))
    assert f"{output}apptainer exec i.sif python3'" in submission.render(image, cray)
    for fewer in (0, 2):  # CUDA would find no GPUs, or the wrong ones
        assert "CUDA_VISIBLE" not in submission.render(dataclasses.replace(GPUS, gpus_per_node=fewer), cray)
    assert "CUDA_VISIBLE" not in submission.render(GPUS, GENERIC)


def test_job_options_override_options_for_all_jobs():
    """sbatch uses the last directive of an option."""
    options = ("--partition=all", "--time=5", "--no-requeue")
    site = dataclasses.replace(GENERIC, scheduler=dataclasses.replace(GENERIC.scheduler, options=options))
    job = dataclasses.replace(PLAIN, partition="mine", walltime="00:30:00")
    messages = dict(re.findall(r"^#SBATCH --([a-z]+)=(.*)$", submission.render(job, site), re.MULTILINE))
    assert (messages["partition"], messages["time"]) == ("mine", "00:30:00")
    assert re.findall(r"^#SBATCH (--(?:no-)?requeue)$", submission.render(job, site), re.MULTILINE)[-1] == "--requeue"


def test_missing_site_init_file_ends_the_job(start_job, tmp_path):
    def run_with_init(init):
        environment = dataclasses.replace(GENERIC.environment, init=str(tmp_path / init))
        return wait_for_end(start_job(PLAIN, dataclasses.replace(GENERIC, environment=environment), CODE="0"))[0]

    assert run_with_init("missing") == 69 and not (tmp_path / "arguments").exists()
    (tmp_path / "init").write_text("export UNSET=$NEVER_SET\nfalse\n")
    assert run_with_init("init") == 0 and (tmp_path / "arguments").exists()


def test_warmup_uses_the_python_of_the_ranks():
    job = dataclasses.replace(PLAIN, warmup=True, local=Path("/local/a b"))
    assert '\non_each_node "${hpcdist[@]}" warmup' in submission.render(job, GENERIC)
    image = dataclasses.replace(job, python_of_ranks=("apptainer", "exec", "i j.sif", "python3"))
    assert "on_each_node apptainer exec 'i j.sif' python3 -P -m hpcdist warmup" in submission.render(image, GENERIC)


def test_rank_threads_equal_its_cores():
    text = submission.render(PLAIN, GENERIC)
    done = jobs.run(
        ["bash", "-c", "\n".join(re.findall(r"export .*", text)) + "\necho $OMP_NUM_THREADS $OPENBLAS_NUM_THREADS"],
        check=True,
    )
    assert done.stdout == "8 8\n"
    assert "#SBATCH --cpus-per-task=8\n" in text


def test_site_block_can_extend_the_template_block():
    site = dataclasses.replace(GENERIC, blocks={"variables": "{{ super() }}export OF_NODES={{ job.nodes | sh }}\n"})
    text, plain = submission.render(PLAIN, site), submission.render(PLAIN, GENERIC)
    (line,) = set(text.splitlines()) - set(plain.splitlines())
    assert line == "export OF_NODES=2" and text.replace(line + "\n", "", 1) == plain


@cases(
    "blocks, words",
    ({"lunch": "true"}, "nearest known is 'launch'"),
    ({"launch": "{{ job.nothing }}"}, "cannot be rendered"),
    ({"launch": "{% if %}"}, "cannot be rendered"),
)
@pytest.mark.full_except("blocks0-nearest known is 'launch'")
def test_invalid_blocks_are_rejected(blocks, words):
    with pytest.raises(ConfigurationError, match=words):
        submission.render(PLAIN, dataclasses.replace(GENERIC, blocks=blocks))


@cases(
    "text",
    "{{ cycler.__init__.__globals__.os.system('touch reached') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ('{0.__class__.__init__}').format(job) }}",
    "{{ job.run_dir.write_text('reached') }}",
    "{{ [job.run_dir] | map(attribute='touch') | first }}",
    "{{ (job.run_dir | attr('parent')).cwd() }}",
    "{{ site.environment.variables.update(a='b') }}",
    "{{ job.sbatch_args.__class__ }}",
)
@pytest.mark.full_except("{{ ''.__class__.__mro__[1].__subclasses__() }}")
def test_blocks_cannot_execute_code(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = dataclasses.replace(PLAIN, run_dir=tmp_path / "reached")
    with pytest.raises(ConfigurationError, match=r"\[blocks\] of the site .*cannot be rendered"):
        submission.render(job, dataclasses.replace(GENERIC, blocks={"variables": text + "\n"}))
    assert not list(tmp_path.iterdir())
