"""Metrics for Prometheus: promtool accepts them, counters over resumes, and the three ways to publish them."""

import json
import math
import os
import pwd
import shutil
import socket
import stat
import sys
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import replace

import pytest

from harness import jobs
from harness.jobs import LIMIT_S, until
from harness.marks import cases
from hpcdist.errors import ConfigurationError, MissingCapabilityError, StorageError
from hpcdist.telemetry import prometheus as module
from hpcdist.telemetry import provenance
from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.telemetry.event_stream import EventStream, RunInfo
from hpcdist.telemetry.metrics import quantities
from hpcdist.telemetry.metrics.observations import RunEvent
from hpcdist.telemetry.metrics.quantities import COUNTER, QUANTITIES
from hpcdist.telemetry.prometheus import RESTORED, PrometheusSink

pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

from stubs import gateway as pushgateway

TEXTFILE = TelemetryConfig(prometheus="textfile")
HTTP = TelemetryConfig(prometheus="http", port=0)
GROUP = "/metrics/job/hpcdist/jobid/42"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    """No request leaves the machine."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def run_in(folder, jobid="42", resumed_step=None, **more):
    return RunInfo("a-run", folder, jobid, 2, 1, "allreduce", resumed_step, **more)


OWNER = {"user": "ada", "account": 'phy"sics', "partition": "gpu", "qos": ""}


def step(number, **values):
    return RunEvent("step", number, {"training_loss_nats": 1.0 / number, "steps_total": number, **values})


def samples(text):
    """Return {(name, sorted labels)} -> value, without the labels jobid and run, which are the same everywhere."""
    results = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "a-run" and labels.pop("jobid") in ("42", "a-run")
            results[sample.name, *sorted(labels.items())] = sample.value
    return results


def read_samples(sink):
    if sink.where.startswith("http"):
        with urllib.request.urlopen(sink.where, timeout=10) as answer:
            return samples(answer.read().decode())
    with open(sink.where) as file:
        return samples(file.read())


def event_with_all_figures(rng):
    """Return an event with a value for each figure of the catalogue, and two for figures with a label."""
    values = {}
    for name, quantity in QUANTITIES.items():
        for label in ("a", 'odd "label"\\') if quantity.label else ("",):
            values[quantities.key(name, label)] = float(rng.random())
    return RunEvent("step", 1, values)


# --- what is shown --------------------------------------------------------------------------------------------------


def test_every_figure_has_its_catalogue_name(tmp_path, rng):
    sink, event = PrometheusSink(run_in(tmp_path), TEXTFILE), event_with_all_figures(rng)
    sink.write([event])
    result = read_samples(sink)
    assert len(result) == len(event.values)
    for key, value in event.values.items():
        name, label = quantities.split(key)
        labels = [] if label is None else [(QUANTITIES[name].label, label)]
        assert result[f"hpcdist_{name}", *labels] == value
    with open(sink.where) as file:
        text = file.read()
    for quantity in QUANTITIES.values():
        assert f"# HELP {quantity.prometheus} {quantity.meaning} ({quantity.unit})\n" in text
        assert f"# TYPE {quantity.prometheus} {quantity.kind}\n" in text
    assert "python_" not in text and "process_" not in text and "_created" not in text


def test_promtool_accepts_the_output(tmp_path, rng):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool: apt-get install prometheus")
    sink = PrometheusSink(run_in(tmp_path), TEXTFILE)
    sink.write([event_with_all_figures(rng)])
    with open(sink.where) as file:
        text = file.read()
    check = [promtool, "check", "metrics"]
    done = jobs.run(check, text=text)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    wrong = text.replace("hpcdist_steps_total", "hpcdist_steps")  # the test of the test
    assert jobs.run(check, text=wrong).returncode


def test_missing_values_are_not_shown(tmp_path):
    sink = PrometheusSink(run_in(tmp_path), TEXTFILE)
    assert read_samples(sink) == {}
    sink.write([step(1, gradient_norm=math.nan, why="text", **{"power_watts[gpu]": 300.0, "emissions_grams_total": 2})])
    assert read_samples(sink) == {
        ("hpcdist_training_loss_nats",): 1,
        ("hpcdist_steps_total",): 1,
        ("hpcdist_power_watts", ("source", "gpu")): 300,
        ("hpcdist_emissions_grams_total",): 2,
    }
    sink.write([step(2, **{"power_watts[gpu]": math.nan, "emissions_grams_total": math.nan})])
    assert ("hpcdist_power_watts", ("source", "gpu")) not in read_samples(sink)
    assert read_samples(sink)["hpcdist_emissions_grams_total",] == 2  # a counter does not vanish


def test_run_without_a_job_uses_its_name_as_job_id(tmp_path):
    sink = PrometheusSink(run_in(tmp_path, jobid=""), TEXTFILE)
    sink.write([step(1)])
    assert sink.where.endswith("/hpcdist_a-run.prom")
    with open(sink.where) as file:
        assert 'hpcdist_steps_total{jobid="a-run",run="a-run"} 1.0' in file.read()


def test_name_with_special_characters_makes_one_file(tmp_path):
    sink = PrometheusSink(RunInfo("näme/of run", tmp_path, "", 1, 1, ""), TEXTFILE)
    assert os.path.basename(sink.where) == "hpcdist_n_me_of_run.prom"
    with open(sink.where) as file:
        assert file.read() == ""


def test_job_owner_is_in_the_labels_of_one_metric(tmp_path, rng):
    event = event_with_all_figures(rng)
    without, sink = (PrometheusSink(run, TEXTFILE) for run in (run_in(tmp_path), run_in(tmp_path, owner=OWNER)))
    series = []
    for each in (without, sink):
        each.write([event])
        series.append(read_samples(each))
    info = ("hpcdist_job_info", *sorted(OWNER.items()))
    assert series[1] == series[0] | {info: 1}, "and no other series has them"


VARIABLES = {
    "SLURM_JOB_USER": "ada", "SLURM_JOB_ACCOUNT": "physics", "SLURM_JOB_PARTITION": "gpu", "SLURM_JOB_QOS": "normal",
    "SLURM_JOB_ID": "42",
}  # fmt: skip
PBS = {"PBS_O_LOGNAME": "bob", "PBS_ACCOUNT": "chemistry", "PBS_QUEUE": "prod", "PBS_JOBID": "7.server"}


@cases(
    "environment, number, owner",
    (VARIABLES, "42", ["ada", "physics", "gpu", "normal"]),
    ({"SLURM_JOB_USER": "ada", "SLURM_JOB_ID": "42", "SLURM_JOB_ACCOUNT": ""}, "42", ["ada", "", "", ""]),
    (PBS, "7.server", ["bob", "chemistry", "prod", ""]),
    ({"USER": "whoever"}, "", [pwd.getpwuid(os.getuid()).pw_name, "", "", ""]),
)
def test_job_owner_is_read_from_the_scheduler(environment, number, owner):
    assert provenance.job_number(environment) == number
    assert provenance.job_owner(environment) == dict(zip(("user", "account", "partition", "qos"), owner, strict=True))


def test_user_without_a_name_is_a_number(monkeypatch):
    monkeypatch.setattr("hpcdist.telemetry.provenance.pwd.getpwuid", lambda number: {}[number])
    assert provenance.job_owner({})["user"] == str(os.getuid())


# --- counters over a resume -----------------------------------------------------------------------------------------


def test_no_counter_falls_over_a_resume(tmp_path):
    """The run is killed after step 9 and resumed from step 5: steps are repeated, and message counts restart at 0."""
    of_operation = "collective_seconds_total[ring_allreduce]"
    first = PrometheusSink(run_in(tmp_path), TEXTFILE)
    first.write([step(9, **{"sent_bytes_total": 900, of_operation: 4.5, "energy_joules_total[node]": 90.0})])
    second = PrometheusSink(run_in(tmp_path, resumed_step=5), TEXTFILE)
    before = read_samples(second)  # also before the first step
    assert before["hpcdist_steps_total",] == 9
    seen = [before]
    for number, count in zip(range(6, 13), range(1, 8), strict=True):
        figures = {
            "sent_bytes_total": 100 * count,
            of_operation: 0.5 * count,
            "energy_joules_total[node]": 10.0 * number,
        }
        second.write([step(number, **figures)])
        seen.append(read_samples(second))
    counters = {key for key in seen[-1] if key[0].endswith("_total")}
    assert len(counters) == 4
    for key in counters:
        values = [result[key] for result in seen]
        assert values == sorted(values), key
    assert seen[-1]["hpcdist_steps_total",] == 12
    assert seen[-1]["hpcdist_energy_joules_total", ("source", "node")] == 120
    assert seen[-1]["hpcdist_sent_bytes_total",] == 900 + 700
    assert seen[-1]["hpcdist_collective_seconds_total", ("operation", "ring_allreduce")] == 4.5 + 3.5


def test_totals_are_kept_even_without_the_gateway(tmp_path):
    with pushgateway.running() as gateway:
        sink = PrometheusSink(run_in(tmp_path), TelemetryConfig(prometheus="push", gateway=gateway.address))
        gateway.status = 500
        for number in (1, 2, 3):
            with suppress(StorageError):
                sink.write([step(number, checkpoints_total=number)])
        with suppress(StorageError):
            sink.close(False)
    again = PrometheusSink(run_in(tmp_path, resumed_step=2), HTTP)
    try:
        again.write([step(3, checkpoints_total=1)])
        assert read_samples(again)["hpcdist_checkpoints_total",] == 4
        assert read_samples(again)["hpcdist_steps_total",] == 3
    finally:
        again.close(True)


@pytest.mark.parametrize("content", ["", "[1]", '{"steps_total": "many"}', '{"steps_total"'])
def test_damaged_totals_do_not_prevent_training(tmp_path, content):
    (tmp_path / "prometheus").mkdir()
    (tmp_path / "prometheus" / "counters.json").write_text(content)
    sink = PrometheusSink(run_in(tmp_path, resumed_step=2), TEXTFILE)
    sink.write([step(3)])
    assert read_samples(sink)["hpcdist_steps_total",] == 3


def test_restored_totals_are_counters():
    assert all(QUANTITIES[name].kind == COUNTER for name in RESTORED)


# --- a file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normal", [True, False])
def test_file_belongs_to_the_job_and_is_removed_with_it(tmp_path, normal):
    folder = tmp_path / "node_exporter"
    folder.mkdir()
    (folder / "hpcdist_41.prom").write_text("of another job\n")
    run = tmp_path / "run"
    sink = PrometheusSink(run_in(run), TelemetryConfig(prometheus="textfile", textfile_directory=str(folder)))
    sink.write([step(1)])
    assert sorted(path.name for path in folder.iterdir()) == ["hpcdist_41.prom", "hpcdist_42.prom"]
    sink.close(normal)
    assert [path.name for path in folder.iterdir()] == ["hpcdist_41.prom"]


def test_runs_on_parts_of_a_job_have_files_of_their_own(tmp_path):
    config = TelemetryConfig(prometheus="textfile", textfile_directory=str(tmp_path))
    sinks = [PrometheusSink(replace(run_in(tmp_path, is_part=True), name=name), config) for name in "ab"]
    assert sorted(path.name for path in tmp_path.glob("*.prom")) == ["hpcdist_42-a.prom", "hpcdist_42-b.prom"]
    for sink in sinks:
        sink.close(True)
    assert not list(tmp_path.glob("*.prom"))


def test_file_is_readable_by_the_exporter_of_another_user(tmp_path):
    mask = os.umask(0o077)
    try:
        sink = PrometheusSink(run_in(tmp_path), TEXTFILE)
        sink.write([step(1)])
    finally:
        os.umask(mask)
    assert stat.S_IMODE(os.stat(sink.where).st_mode) == 0o644


def test_reader_never_sees_a_partial_file(tmp_path, rng):
    sink = PrometheusSink(run_in(tmp_path), TEXTFILE)
    event = event_with_all_figures(rng)
    sink.write([event])
    complete, ends, torn = len(event.values), threading.Event(), []

    def read():
        while not ends.is_set():
            result = len(read_samples(sink))
            if result != complete:
                torn.append(result)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(50):
        sink.write([event])
    ends.set()
    reader.join()
    assert torn == []
    assert not [path for path in (tmp_path / "prometheus").iterdir() if path.suffix == ".new"]


def test_missing_directory_is_rejected_with_the_remedy(tmp_path):
    config = TelemetryConfig(prometheus="textfile", textfile_directory=str(tmp_path / "absent"))
    with pytest.raises(StorageError, match=r"absent.*is not a directory.*--collector.textfile.directory") as caught:
        PrometheusSink(run_in(tmp_path), config)
    assert caught.value.exit_code == 74


def test_unwritable_directory_is_rejected_with_the_remedy(tmp_path, monkeypatch):
    folder = tmp_path / "closed"
    folder.mkdir()
    config = TelemetryConfig(prometheus="textfile", textfile_directory=str(folder))
    if os.geteuid() == 0:  # to whom nothing is closed: the kernel's answer is given by hand
        monkeypatch.setattr("hpcdist.reporting.atomic.create", raise_permission_error)
    else:
        folder.chmod(0o500)
    with pytest.raises(StorageError, match=r"Permission denied; choose another telemetry.textfile_directory"):
        PrometheusSink(run_in(tmp_path), config)


def raise_permission_error(path, *arguments):
    raise PermissionError(13, os.strerror(13), str(path))


def test_full_disk_is_reported_once_and_old_figures_stay(tmp_path, monkeypatch):
    sink = PrometheusSink(run_in(tmp_path), TEXTFILE)
    lines = []
    stream = EventStream([sink], lines.append)
    stream.publish([step(1)])
    with monkeypatch.context() as patched:
        patched.setattr("os.replace", lambda old, new: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
        stream.publish([step(2)])
        stream.publish([step(3)])
        assert read_samples(sink)["hpcdist_steps_total",] == 1
    stream.publish([step(4)])
    assert read_samples(sink)["hpcdist_steps_total",] == 4
    assert len(lines) == 2 and "No space left" in lines[0] and "works again" in lines[1]


# --- a port ---------------------------------------------------------------------------------------------------------


def test_chosen_free_port_is_reported(tmp_path):
    sink = PrometheusSink(run_in(tmp_path), HTTP)
    try:
        assert sink.where.startswith("http://127.0.0.1:") and not sink.where.startswith("http://127.0.0.1:0/")
        sink.write([step(1)])
        assert read_samples(sink)["hpcdist_steps_total",] == 1
        sink.write([step(2)])
        assert read_samples(sink)["hpcdist_steps_total",] == 2
        (document,) = json.loads((tmp_path / "prometheus" / "targets.json").read_bytes())
        assert document["targets"] == [sink.where.removeprefix("http://").removesuffix("/metrics")]
    finally:
        sink.close(True)
    with pytest.raises(urllib.error.URLError):
        read_samples(sink)
    assert not (tmp_path / "prometheus" / "targets.json").exists()


def test_server_listens_only_on_this_machine(tmp_path):
    sink = PrometheusSink(run_in(tmp_path), HTTP)
    try:
        assert sink._way._server.socket.getsockname()[0] == "127.0.0.1"
    finally:
        sink.close(True)


def test_used_port_is_rejected_with_the_remedy(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigurationError, match=rf"telemetry.port = {port}: .*Address already in use.*to 0 for"
        ) as caught:
            PrometheusSink(run_in(tmp_path), TelemetryConfig(prometheus="http", port=port))
    assert caught.value.exit_code == 78
    again = PrometheusSink(run_in(tmp_path), TelemetryConfig(prometheus="http", port=port))  # free again
    again.close(True)


# --- a gateway ------------------------------------------------------------------------------------------------------


@pytest.fixture
def gateway():
    with pushgateway.running() as result:
        yield result


def push_sink(folder, gateway):
    return PrometheusSink(run_in(folder), TelemetryConfig(prometheus="push", gateway=gateway.address))


def test_figures_are_pushed_and_deleted_at_a_normal_end(tmp_path, gateway):
    sink = push_sink(tmp_path, gateway)
    assert [*gateway.groups] == [GROUP]  # the constructor made the first push
    sink.write([step(1)])
    until(lambda: "hpcdist_steps_total" in gateway.groups[GROUP])
    assert samples(gateway.groups[GROUP])["hpcdist_steps_total",] == 1
    sink.close(True)
    assert gateway.groups == {}
    assert gateway.requests[-1] == ("DELETE", GROUP)


def test_failed_run_leaves_its_last_figures(tmp_path, gateway):
    sink = push_sink(tmp_path, gateway)
    sink.write([step(1)])
    sink.write([step(2)])
    sink.close(False)
    assert samples(gateway.groups[GROUP])["hpcdist_steps_total",] == 2
    assert all(method == "PUT" for method, _ in gateway.requests)


def test_slow_gateway_delays_no_step_and_gets_the_newest_figures(tmp_path, gateway):
    sink = push_sink(tmp_path, gateway)
    gateway.arrived.clear()
    gateway.answers.clear()
    sink.write([step(1)])
    gateway.arrived.wait(LIMIT_S)
    for number in range(2, 40):  # all of these return while the push of the first one hangs
        sink.write([step(number)])
    assert len(gateway.requests) == 2
    gateway.answers.set()
    until(lambda: samples(gateway.groups[GROUP]).get(("hpcdist_steps_total",)) == 39)
    assert len(gateway.requests) <= 4  # what was due meanwhile is one push, not one for each step
    sink.close(True)


@pytest.mark.parametrize("status", [400, 500])
def test_gateway_error_is_reported_once_and_retried(tmp_path, gateway, status):
    sink, output = push_sink(tmp_path, gateway), []
    stream = EventStream([sink], output.append)
    gateway.status = status
    stream.publish([step(1)])
    until(lambda: len(gateway.requests) >= 2 and sink._way._failure)
    stream.publish([step(2)])
    stream.publish([step(3)])
    assert len(output) == 1 and f"HTTP Error {status}" in output[0] and gateway.address in output[0]
    gateway.status = 200
    until(lambda: stream.publish([step(4)]) or len(output) == 2)
    assert "works again" in output[1]
    until(lambda: samples(gateway.groups[GROUP]).get(("hpcdist_steps_total",)) == 4)
    stream.close(True)
    assert gateway.groups == {}


def test_missing_gateway_is_rejected_with_the_remedy(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    config = TelemetryConfig(prometheus="push", gateway=f"127.0.0.1:{port}")
    with pytest.raises(ConfigurationError, match=rf"127.0.0.1:{port} .*Connection refused.*no_proxy") as caught:
        PrometheusSink(run_in(tmp_path), config)
    assert caught.value.exit_code == 78
    assert not [thread for thread in threading.enumerate() if thread.name == "hpcdist-push"]


def test_hanging_gateway_times_out(tmp_path, gateway, monkeypatch):
    monkeypatch.setattr(module, "PUSH_S", 0.2)
    gateway.answers.clear()
    with pytest.raises(ConfigurationError, match="timed out"):
        push_sink(tmp_path, gateway)


def test_lost_gateway_does_not_delay_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PUSH_S", 0.2)
    for normal in (True, False):
        with pushgateway.running() as gateway:
            sink = push_sink(tmp_path, gateway)
        with pytest.raises(StorageError, match=gateway.address):
            sink.close(normal)
    assert not [thread for thread in threading.enumerate() if thread.name == "hpcdist-push"]


def test_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingCapabilityError, match=r"hpcdist\[prometheus\].*telemetry.prometheus = 'off'"):
        PrometheusSink(run_in(tmp_path), TEXTFILE)
