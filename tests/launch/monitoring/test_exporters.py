"""The real node_exporter and the real Pushgateway accept the exported metrics."""

import math
import shutil
import socket
import subprocess
import time
import urllib.request
from contextlib import contextmanager

import pytest

from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.telemetry.event_stream import RunInfo
from hpcdist.telemetry.metrics import quantities
from hpcdist.telemetry.metrics.observations import RunEvent
from hpcdist.telemetry.metrics.quantities import QUANTITIES

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from harness.jobs import LIMIT_S
from hpcdist.telemetry.prometheus import PrometheusSink

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_proxy")]


@contextmanager
def serving(program, folder, *arguments):
    """Start ``program`` and yield its address."""
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program}: apt-get install {program}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    log = folder / f"{program}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [program, f"--web.listen-address={address}", *arguments], stdout=output, stderr=output, cwd=folder
        )
    try:
        end = time.monotonic() + LIMIT_S
        while True:
            try:
                metrics(address)
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < end, log.read_text()
                time.sleep(0.05)
        yield address
    finally:
        process.kill()
        process.wait()


def metrics(address):
    """Return the value and the help text of each series at the address, by name and labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=LIMIT_S) as answer:
        families = [*text_string_to_metric_families(answer.read().decode())]
    return {
        (sample.name, *sorted(sample.labels.items())): (sample.value, family.documentation)
        for family in families
        for sample in family.samples
    }


def event_with_all_figures(rng, step):
    """Return an event with every figure of the catalogue, with two labels if the figure has labels."""
    values = {}
    for name, quantity in QUANTITIES.items():
        for label in ("a", "loss spike") if quantity.label else ("",):
            values[quantities.key(name, label)] = step + float(rng.random())
    return RunEvent("step", step, values)


def series(key, **labels):
    """Return the key of a figure of the run in the result of `metrics`."""
    name, label = quantities.split(key)
    local_data = {} if label is None else {QUANTITIES[name].label: label}
    return (f"hpcdist_{name}", *sorted({"jobid": "42", "run": "a-run", **local_data, **labels}.items()))


def run_in(folder):
    return RunInfo("a-run", folder, "42", 2, 1, "allreduce")


def test_node_exporter_serves_the_file_of_a_running_job(tmp_path, rng):
    folder = tmp_path / "textfile"
    folder.mkdir()
    arguments = ("--collector.disable-defaults", "--collector.textfile", f"--collector.textfile.directory={folder}")
    with serving("prometheus-node-exporter", tmp_path, *arguments) as address:
        config = TelemetryConfig(prometheus="textfile", textfile_directory=str(folder))
        sink = PrometheusSink(run_in(tmp_path / "run"), config)
        for step in (1, 2):
            event = event_with_all_figures(rng, step)
            sink.write([event])
            result = metrics(address)
            assert result["node_textfile_scrape_error",][0] == 0
            for key, value in event.values.items():
                shown, meaning = result[series(key)]
                quantity = QUANTITIES[quantities.split(key)[0]]
                assert math.isclose(shown, value) and meaning == f"{quantity.meaning} ({quantity.unit})"
        sink.close(True)
        assert not [key for key in metrics(address) if str(key[0]).startswith("hpcdist_")]


@pytest.mark.parametrize("normal", [True, False])
def test_pushgateway_serves_the_group_until_the_run_ends(tmp_path, rng, normal):
    with serving("prometheus-pushgateway", tmp_path) as address:
        sink = PrometheusSink(run_in(tmp_path / "run"), TelemetryConfig(prometheus="push", gateway=address))
        events = [event_with_all_figures(rng, step) for step in (1, 2)]
        last = {series(key, job="hpcdist", instance=""): value for key, value in events[-1].values.items()}
        for event in events:
            sink.write([event])
        end = time.monotonic() + LIMIT_S
        while not contains_values(metrics(address), last):
            assert time.monotonic() < end
            time.sleep(0.05)
        sink.close(normal)
        if not normal:
            assert contains_values(metrics(address), last)
        while normal and any(str(key[0]).startswith("hpcdist_") for key in metrics(address)):
            assert time.monotonic() < end  # the gateway has accepted the deletion, and makes it when it comes to it
            time.sleep(0.05)


def contains_values(result, values):
    return all(key in result and math.isclose(result[key][0], value) for key, value in values.items())
