"""Running jobs observed from outside: by a real Prometheus, through a file, at a gateway, and in TensorBoard files."""

import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest

from harness import jobs
from harness.jobs import LIMIT_S
from hpcdist.telemetry.metrics import step_metrics

ENDLESS = 10**6  # steps: no machine is done before it is told to stop
SETTINGS = (
    "model.layers=1", "model.hidden=32", "model.heads=2", "data.context=16", "run.global_batch=6",
    "checkpoint.every_steps=50",
)  # fmt: skip

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_proxy")]


def line(text, out, *settings, steps):
    given = [*SETTINGS, f"data.path={text}", f"run.steps={steps}", *settings]
    keys = [word for key in given for word in ("--set", key)]
    return [sys.executable, "-m", "hpcdist", "run", "-n", "2", "train", "--out", str(out), "--resume", "auto", *keys]


class Job:
    """A training on two ranks that runs until it is stopped."""

    def __init__(self, text, out, *settings):
        self.out, self.errors = out, out.with_suffix(f".{time.monotonic_ns()}.err")
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                line(text, out, *settings, steps=ENDLESS),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def wait_for(self, condition):
        """Return the first true value of ``condition``."""
        end = time.monotonic() + LIMIT_S
        while not (result := condition()):
            assert self.process.poll() is None, self.errors.read_text()
            assert time.monotonic() < end, f"nothing happened in time\n{self.errors.read_text()}"
            time.sleep(0.05)
        return result

    def stop(self):
        """Request a checkpoint and the end, and check both."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(LIMIT_S) == 75, self.errors.read_text()

    def kill(self):
        """Kill the launcher, and wait until its ranks are gone too. They do not outlive it for long."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        jobs.until(lambda: not jobs.is_running(self.out), "end of the ranks after that of their launcher")


@contextmanager
def job(text, out, *settings):
    started = Job(text, out, *settings)
    try:
        yield started
    finally:
        started.kill()


class Prometheus:
    """A real Prometheus, which scrapes the targets of a file every second."""

    def __init__(self, folder, targets):
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.address = f"127.0.0.1:{server.getsockname()[1]}"
        folder.mkdir()
        scrape = {"job_name": "hpcdist", "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}]}
        config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [scrape]}
        (folder / "prometheus.yml").write_text(json.dumps(config))  # which is YAML, too
        arguments = (
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self.address}",
        )
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(["prometheus", *arguments], stdout=log, stderr=log, start_new_session=True)

    def query(self, expression):
        """Return the labels and the value of each series, or nothing while Prometheus is not ready."""
        assert self.process.poll() is None, self.log.read_text()
        url = f"http://{self.address}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
                result = json.load(answer)
        except OSError:  # it does not listen yet, or is not ready
            return []
        return [(row["metric"], float(row["value"][1])) for row in result["data"]["result"]]

    def stop(self):
        self.process.kill()
        self.process.wait()


def steps_in(path):
    """Return the number of steps in a file of metrics, or 0 if the file has no steps yet."""
    if not path.exists():
        return 0.0
    rows = [row for row in path.read_text().splitlines() if row.startswith("hpcdist_steps_total{")]
    return float(rows[0].split()[-1]) if rows else 0.0


def test_prometheus_scrapes_a_running_job(text, tmp_path):
    if shutil.which("prometheus") is None:
        pytest.skip("there is no prometheus: apt-get install prometheus")
    pytest.importorskip("prometheus_client")
    out = tmp_path / "run"
    targets = out / "prometheus" / "targets.json"
    with job(text, out, "telemetry.prometheus=http", "telemetry.port=0") as running:
        running.wait_for(targets.exists)
        (group,) = json.loads(targets.read_bytes())
        address = group["targets"][0]
        running.wait_for(lambda: f"http://{address}/metrics" in running.errors.read_text())  # a person is told, too
        prometheus = Prometheus(tmp_path / "prometheus", targets)
        try:
            ((labels, first),) = running.wait_for(lambda: prometheus.query("hpcdist_steps_total > 0"))
            assert labels == {
                "__name__": "hpcdist_steps_total", "jobid": "run", "run": "run", "job": "hpcdist", "instance": address,
            }  # fmt: skip
            running.wait_for(lambda: prometheus.query(f"hpcdist_steps_total > {first}"))
            ((_, loss),) = prometheus.query("hpcdist_training_loss_nats")
            assert 0 < loss < 2 * np.log(256)
            assert [value for _, value in prometheus.query("hpcdist_world_ranks")] == [2]
            ((info, one),) = prometheus.query("hpcdist_job_info")
            assert (info["user"], info["run"], one) == (getpass.getuser(), "run", 1)
            phases = {labels["phase"]: value for labels, value in prometheus.query("hpcdist_phase_seconds")}
            assert {"compute", "communication", "update"} <= set(phases)
            assert phases["compute"] > 0
            assert [value for _, value in prometheus.query('up{job="hpcdist"}')] == [1]
            running.wait_for(lambda: prometheus.query("rate(hpcdist_tokens_total[1m]) > 0"))
            running.stop()
        finally:
            prometheus.stop()
    assert not targets.exists()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://{address}/metrics", timeout=LIMIT_S)


def test_killed_and_resumed_job_reports_each_step_once(text, tmp_path):
    """The job writes a text file, TensorBoard files and JSON lines."""
    pytest.importorskip("prometheus_client")
    pytest.importorskip("tensorboardX")
    from stubs import event_files

    out, folder = tmp_path / "run", tmp_path / "node_exporter"
    folder.mkdir()
    sinks = (
        "telemetry.prometheus=textfile", f"telemetry.textfile_directory={folder}", "telemetry.tensorboard=true",
        "telemetry.jsonl=true",
    )  # fmt: skip
    shown = folder / "hpcdist_run.prom"
    with job(text, out, *sinks) as running:
        before = running.wait_for(lambda: (out / "checkpoints" / "latest").exists() and steps_in(shown))
        if shutil.which("promtool") is not None:
            done = subprocess.run(
                ["promtool", "check", "metrics"],
                input=shown.read_bytes(),
                capture_output=True,
                timeout=LIMIT_S,
                check=False,
            )
            assert (done.returncode, done.stdout + done.stderr) == (0, b"")
        running.kill()
    # Nobody was left to remove it, unless rank 0 was the last to die: it had time to see that the other was gone.
    assert steps_in(shown) >= before or not shown.exists()
    before = max(before, steps_in(shown))
    with job(text, out, *sinks) as running:
        counts = [before]

        def has_new_steps():
            if shown.exists():
                counts.append(steps_in(shown))
            return counts[-1] > before

        running.wait_for(has_new_steps)
        running.stop()
    assert counts == sorted(counts), "a counter fell"
    assert [*folder.iterdir()] == []
    steps = step_metrics.read(out / "metrics.h5").steps
    every = [*range(1, int(steps["step"][-1]) + 1)]
    assert steps["step"].tolist() == every
    scalars = event_files.scalars(out / "tensorboard")
    assert [step for step, *_ in scalars["loss/training"]] == every
    assert [loss for _, loss, _ in scalars["loss/training"]] == steps["loss"].astype(np.float32).tolist()
    times = [time for *_, time in scalars["loss/training"]]
    assert times == sorted(times) and times[-1] - times[0] < 2 * LIMIT_S
    assert "hidden = 32" in event_files.texts(out / "tensorboard")["recipe"]
    rows = [json.loads(row) for row in (out / "events.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "step"] == every
    assert [row["kind"] for row in rows].count("begin") == 2
    assert rows[-1]["kind"] == "end"
    assert {len(row["ranks"]["compute_seconds"]) for row in rows if row["kind"] == "step"} == {2}


def test_job_deletes_its_group_at_the_gateway_when_it_ends(text, tmp_path):
    pytest.importorskip("prometheus_client")
    from stubs import gateway

    group = "/metrics/job/hpcdist/jobid/run"
    with gateway.running() as result:
        with job(text, tmp_path / "run", "telemetry.prometheus=push", f"telemetry.gateway={result.address}") as running:
            running.wait_for(lambda: 'hpcdist_steps_total{jobid="run",run="run"}' in result.groups.get(group, ""))
            running.stop()
        assert result.groups == {}
        assert result.requests[-1] == ("DELETE", group)
        assert set(result.requests[:-1]) == {("PUT", group)}


def test_failing_sink_is_reported_once_and_the_run_continues(text, tmp_path):
    pytest.importorskip("prometheus_client")
    out, folder = tmp_path / "run", tmp_path / "node_exporter"
    folder.mkdir()
    sinks = ("telemetry.prometheus=textfile", f"telemetry.textfile_directory={folder}")
    with job(text, out, *sinks) as running:
        running.wait_for(lambda: steps_in(folder / "hpcdist_run.prom"))
        folder.rename(tmp_path / "away")
        folder.write_text("a file where the directory was")
        running.wait_for(lambda: "it is tried again" in running.errors.read_text())
        done = step_metrics.read(out / "metrics.h5").steps["step"][-1]
        running.wait_for(lambda: step_metrics.read(out / "metrics.h5").steps["step"][-1] > done)
        folder.unlink()
        (tmp_path / "away").rename(folder)
        running.wait_for(lambda: "Prometheus: works again" in running.errors.read_text())
        assert running.errors.read_text().count("it is tried again") == 1
        running.stop()


@pytest.mark.parametrize("what", ["port", "gateway", "directory"])
@pytest.mark.matrix_except("gateway")
def test_unusable_sinks_are_rejected_before_the_first_step(text, tmp_path, what):
    pytest.importorskip("prometheus_client")
    out = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if what == "gateway":
            taken.close()
        mode, setting, code, words = {
            "port": ("http", f"port={port}", 78, ("Address already in use", "to 0 for any free port")),
            "gateway": ("push", f"gateway=127.0.0.1:{port}", 78, ("Connection refused", "telemetry.gateway")),
            "directory": (
                "textfile",
                f"textfile_directory={tmp_path / 'no'}",
                74,
                ("is not a directory", "node_exporter"),
            ),
        }[what]
        keys = (f"telemetry.prometheus={mode}", f"telemetry.{setting}", "telemetry.tensorboard=true")
        done = jobs.run(line(text, out, *keys, steps=5))
    assert done.returncode == code, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr
    again = jobs.run(line(text, out, steps=5))
    assert again.returncode == 0, again.stderr  # it does not occupy the directory


def test_profiler_sees_the_operations_of_every_rank(text, tmp_path):
    from stubs import nvtx_tool

    keys = ("telemetry.nvtx=true", "checkpoint.every_steps=2")
    variables = os.environ | nvtx_tool.environment(tmp_path)
    done = jobs.run(line(text, tmp_path / "run", *keys, steps=4), env=variables)
    assert done.returncode == 0, done.stderr
    results = [rows for rows in nvtx_tool.ranges(tmp_path).values() if rows]
    assert len(results) == 2  # ranks; all of their ranges were left
    for rows in results:
        names = [name for _, name in rows]
        assert names.count("AGREE") == names.count("BACKWARD microbatch 0 unit 0") == 4
        assert names.count("wait for data") >= 4
        assert names.count("save") == 2
        depths = [depth for depth, name in rows if name == "FORWARD microbatch 0 unit 0"]
        inside = rows[names.index("validation")][0] + 1
        assert (
            depths[4:] == [inside] * len(depths[4:]) and len(depths) > 4
        )  # after the steps, the ranges of the validation
