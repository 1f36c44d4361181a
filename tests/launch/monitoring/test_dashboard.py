"""The dashboard and the rules on a real Prometheus: every panel has data of a run."""

import json
import re
import shutil
import time

import numpy as np
import pytest

from harness.jobs import LIMIT_S
from hpcdist.arrays.backend import CATEGORIES
from hpcdist.batch import job
from hpcdist.energy.sources.utilisation import SHARES
from hpcdist.telemetry.anomalies import KINDS
from hpcdist.telemetry.event_stream import RunInfo
from hpcdist.telemetry.metrics import quantities
from hpcdist.telemetry.metrics.quantities import COUNTER, QUANTITIES
from hpcdist.telemetry.provenance import OWNER_VARIABLES

pytest.importorskip("prometheus_client", reason="it shows the figures: pip install 'hpcdist[prometheus]'")
from stubs.backfilled_prometheus import backfilled, openmetrics

FOLDER = job.folder(job.MONITORING)
DASHBOARD = json.loads((FOLDER / "hpcdist.json").read_text())
QUERIES = [
    pytest.param(panel, target, id=f"{panel['id']}{target['refId']} {panel['title']}")
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
]
MOMENTS, EVERY_S = 400, 15.0
ODD = 200  # the moment of an anomaly
LABELS = {
    "phase": ("compute", "communication", "update", "data", "other"),
    "operation": ("ring_allreduce", "native_all_gather", "barrier"),
    "category": CATEGORIES,
    "kind": KINDS,
    "source": ("gpu", "cpu"),
    "resource": SHARES,
    "direction": ("sent", "received"),
    "name": ("accuracy",),
}

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not (shutil.which("prometheus") and shutil.which("promtool")),
        reason="there is no prometheus: apt-get install prometheus",
    ),
]


def figures(number, at, began, rng):
    """Return every figure of the catalogue with every label, at one moment of a run."""
    results = {}
    for name, quantity in QUANTITIES.items():
        for label in LABELS[quantity.label] if quantity.label else ("",):
            value = number * rng.uniform(0.99, 1.01) if quantity.kind == COUNTER else float(rng.uniform(0.5, 1))
            results[quantities.key(name, label)] = value
    results |= {"start_timestamp_seconds": began, "last_step_timestamp_seconds": at - 1}
    flags = {name: float(number >= ODD) for name in results if name.startswith("anomalies_total")}
    return results | (flags if number >= ODD else dict.fromkeys(flags, float("nan")))


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """A Prometheus that has scraped a run until now, and the first and last time of its samples."""
    folder, rng = tmp_path_factory.mktemp("prometheus"), np.random.default_rng()
    end = time.time()
    began = end - MOMENTS * EVERY_S
    run = RunInfo("some run", folder, "4711", 8, 2, "allreduce", owner=dict.fromkeys(OWNER_VARIABLES, "x"))
    moments = [(began + number * EVERY_S, number) for number in range(1, MOMENTS + 1)]
    text = openmetrics(run, ((at, figures(number, at, began, rng)) for at, number in moments))
    with backfilled(folder, text, [FOLDER / "rules.yml", FOLDER / "alerts.yml"]) as server:
        yield server, began, end


def with_run_labels(expression):
    for name, value in (("$jobid", "4711"), ("$run", "some run"), ("$__rate_interval", "1m")):
        expression = expression.replace(name, value)
    return expression


@pytest.mark.parametrize(("panel", "target"), QUERIES)
def test_every_panel_has_data(prometheus, panel, target):
    server, began, end = prometheus
    result = server.series(with_run_labels(target["expr"]), began + 300, end, EVERY_S)
    assert result
    for series in result:
        values = np.array([float(value) for _, value in series["values"]])
        assert len(values) > 100 and np.isfinite(values).all()
        # The name in the legend tells the series apart.
        labels = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        assert set(series["metric"]) == set(labels)
    if panel["type"] == "stat":
        assert len(result) == 1


def test_annotations_mark_starts_and_anomalies(prometheus):
    server, began, end = prometheus
    starts, flags = (result for result in DASHBOARD["annotations"]["list"] if "expr" in result)
    (series,) = server.series(with_run_labels(starts["expr"]), began + 60, end, 60)
    assert np.allclose([float(value) for _, value in series["values"]], began * 1000, rtol=1e-12)
    result = server.series(with_run_labels(flags["expr"]), began + 60, end, EVERY_S)
    assert {series["metric"]["kind"] for series in result} == set(KINDS)
    for series in result:
        times = np.array([float(at) for at, _ in series["values"]])
        assert np.abs(times - (began + ODD * EVERY_S)).max() <= 60 + EVERY_S  # only when they came


def test_dashboard_variables_find_the_run(prometheus):
    server, began, end = prometheus
    for variable, value in zip(DASHBOARD["templating"]["list"], ("4711", "some run"), strict=True):
        asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
        assert asked
        values = server.get(
            f"label/{asked[2]}/values", **{"match[]": with_run_labels(asked[1]), "start": began, "end": end}
        )
        assert values == [value]


def test_rules_are_evaluated_by_prometheus(prometheus):
    server, *_ = prometheus
    deadline = time.monotonic() + LIMIT_S
    while True:
        rules = [rule for group in server.get("rules")["groups"] for rule in group["rules"]]
        if all(rule["health"] == "ok" for rule in rules):
            break
        assert time.monotonic() < deadline, rules
        time.sleep(0.2)
    assert {rule["type"] for rule in rules} == {"recording", "alerting"}
