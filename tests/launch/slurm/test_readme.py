"""The two first commands of slurm/README.md, run as a reader types them, on the real Slurm."""

import re
import sys

import pytest

from hpcdist.batch import job

pytestmark = pytest.mark.full


def test_readme_commands_submit_the_default_job(cluster, tmp_path):
    block = re.search(r"```sh\n(.*?)```", (job.folder(job.TEMPLATES).parent / "README.md").read_text(), re.DOTALL)
    assert block is not None
    submit, status = (line.partition(" #")[0].split() for line in block[1].splitlines())
    this = [sys.executable, "-P", "-m", "hpcdist"]
    assert submit[0] == status[0] == "hpcdist"
    done = cluster.run(*this, *submit[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+\n", done.stdout)
    number, log = done.stdout.strip(), tmp_path / f"hpcdist-{done.stdout.strip()}.out"
    try:
        cluster.wait(lambda: log.exists() and "\nstep 1/" in log.read_text(), "first step")
        shown = cluster.run(*this, *status[1:], cwd=tmp_path)
        assert shown.returncode == 0 and re.search(rf"^{number} .*RUNNING", shown.stdout, re.MULTILINE), shown
        assert "4 ranks on 2 nodes" in log.read_text()
    finally:
        print(log.read_text() if log.exists() else "no log")
        cluster.run("scancel", number)
    cluster.wait(lambda: number not in cluster.run("squeue", "-h", "-o", "%i").stdout.split(), "the end of the job")
