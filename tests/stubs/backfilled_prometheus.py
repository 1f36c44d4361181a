"""A real Prometheus with samples of the past, as the exporter of a run would have shown them."""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcdist.telemetry.event_stream import RunInfo
from hpcdist.telemetry.metrics.observations import RunEvent
from hpcdist.telemetry.prometheus import CounterTotals, LatestFigures

START_S = 60.0  # generous: a loaded machine must not fail a test
Moment = tuple[float, Mapping[str, float]]  # Unix time, figures by their keys in the catalogue


def openmetrics(run: RunInfo, moments: Iterable[Moment]) -> str:
    """Return the output of the exporter at each moment, with its time, in OpenMetrics format."""
    shown = LatestFigures(run, CounterTotals(run.directory / "none"))
    families: dict[str, list[str]] = {}
    for at, values in moments:
        shown.update([RunEvent("step", 0, values)])
        for metric in shown.collect():
            for sample in metric.samples:
                labels = ",".join(f"{name}={json.dumps(value)}" for name, value in sample.labels.items())
                families.setdefault(sample.name, []).append(f"{sample.name}{{{labels}}} {sample.value!r} {at:.3f}")
    return "\n".join(line for lines in families.values() for line in lines) + "\n# EOF\n"


class Server:
    """Asks a Prometheus at ``address``."""

    def __init__(self, address: str) -> None:
        self.address = address
        # Nothing goes through a proxy: it is this machine.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def get(self, path: str, **parameters: Any) -> Any:
        """Return the data of an answer. Raises AssertionError with the error text of a bad query."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with self._open(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def is_ready(self) -> bool:
        try:
            with self._open(f"http://{self.address}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def series(self, expression: str, begin: float, end: float, step: float) -> list[dict[str, Any]]:
        """Return the series of ``expression`` from ``begin`` to ``end``."""
        result = self.get("query_range", query=expression, start=begin, end=end, step=step)
        return list(result["result"])


@contextmanager
def backfilled(folder: Path, text: str, rules: Sequence[Path] = ()) -> Iterator[Server]:
    """Run a Prometheus that holds the samples of ``text``, as if it had scraped them, and evaluates ``rules``."""
    (folder / "samples.txt").write_text(text)
    made = subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(folder / "samples.txt"), str(folder / "data")],
        capture_output=True,
        text=True,
        timeout=2 * START_S,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    config = {"global": {"evaluation_interval": "1s"}, "rule_files": [str(path) for path in rules]}
    (folder / "prometheus.yml").write_text(json.dumps(config))  # which is YAML, too
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    log = folder / "log"
    with log.open("w") as written:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=written,
            stderr=written,
        )
    try:
        server, end = Server(address), time.monotonic() + START_S
        while not server.is_ready():
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        yield server
    finally:
        process.kill()
        process.wait()
