"""The dashboard, rules and alerts of slurm/monitoring: consistent with the exporter, accepted by promtool."""

import json
import re
import shutil
from itertools import combinations

import pytest

from harness import jobs
from harness.marks import cases
from hpcdist.batch import job
from hpcdist.telemetry.metrics.quantities import COUNTER, QUANTITIES
from hpcdist.telemetry.prometheus import INFO
from hpcdist.telemetry.provenance import OWNER_VARIABLES

FOLDER = job.folder(job.MONITORING)
ALWAYS = {"jobid", "run"}  # labels of every metric
ADDED = {"instance", "job"}  # by Prometheus
METRICS = {quantity.prometheus: quantity for quantity in QUANTITIES.values()}
DASHBOARD = json.loads((FOLDER / "hpcdist.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES, ALERTS = (FOLDER / name for name in ("rules.yml", "alerts.yml"))

_TOKEN = re.compile(
    r"""(?P<text>"(?:\\.|[^"])*"|'(?:\\.|[^'])*')|(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)|(?P<other>\$?\w+|\S)""", re.X
)
_GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}


def used_metrics(expression):
    """Yield (metric, labels in its selector, the applied function) for each metric of a PromQL expression."""
    tokens = list(_TOKEN.finditer(expression))
    called = []
    index = 0
    while index < len(tokens):
        word, kind = tokens[index].group(), tokens[index].lastgroup
        after = tokens[index + 1].group() if index + 1 < len(tokens) else ""
        if kind == "name" and word in _GROUPING:  # its parentheses hold labels
            while index + 1 < len(tokens) and tokens[index].group() != ")":
                index += 1
        elif word == "(":
            before = tokens[index - 1].group() if index and tokens[index - 1].lastgroup == "name" else ""
            called.append(before)
        elif word == ")":
            called.pop()
        elif kind == "name" and "hpcdist_" in word:
            labels = set()
            if after == "{":
                while tokens[index].group() != "}":
                    index += 1
                    if tokens[index].lastgroup == "name":
                        labels.add(tokens[index].group())
            yield word, labels, called[-1] if called else ""
        index += 1
    assert not called, f"parentheses do not match: {expression}"


def grouped_by(expression):
    return {name.strip() for names in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression) for name in names.split(",")}


def rules_of(path):
    """Return (record or alert, expression) of each rule.

    The files are simple enough to be read without a YAML parser.
    """
    results = []
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        if begun := re.match(r" *- (record|alert): (\S+)$", line):
            results.append({begun[1]: begun[2]})
        elif begun := re.match(r"( +)expr: (.*)$", line):
            if not begun[2].startswith("|"):
                results[-1]["expr"] = begun[2]
                continue
            deeper = lines[number + 1 :]
            end = next(i for i, text in enumerate([*deeper, ""]) if not text.startswith(begun[1] + " "))
            results[-1]["expr"] = " ".join(text.strip() for text in deeper[:end])
    return results


RECORDED = {rule["record"] for rule in rules_of(RULES)}


def expressions():
    panels = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
    annotations = [(result["name"], result["expr"]) for result in DASHBOARD["annotations"]["list"] if "expr" in result]
    variables = [(result["name"], result["definition"]) for result in DASHBOARD["templating"]["list"]]
    rules = [(rule.get("record") or rule["alert"], rule["expr"]) for path in (RULES, ALERTS) for rule in rules_of(path)]
    everything = [*panels, *annotations, *variables, *rules]
    return [pytest.param(expression, id=f"{number} {name}") for number, (name, expression) in enumerate(everything)]


def test_test_parser_of_expressions():
    text = 'sum by (a, hpcdist_no) (rate(hpcdist_b_total{x="hpcdist_c", y=~"d"}[5m])) / on (e) level:hpcdist_f:max'
    text += " - hpcdist_g"
    assert list(used_metrics(text)) == [("hpcdist_b_total", {"x", "y"}, "rate"), ("level:hpcdist_f:max", set(), ""),
                                ("hpcdist_g", set(), "")]  # fmt: skip
    assert grouped_by(text) == {"a", "hpcdist_no", "e"}
    with pytest.raises((AssertionError, IndexError)):
        list(used_metrics("sum(hpcdist_a"))


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_is_exported(expression):
    results = list(used_metrics(expression))
    assert results
    labels = set()
    for name, selected, function in results:
        if name in RECORDED:
            labels |= ALWAYS | {"kind", *OWNER_VARIABLES}
            continue
        if name == INFO:
            labels |= ALWAYS | set(OWNER_VARIABLES)
            assert selected <= labels and not function.endswith(("rate", "increase", "_over_time"))
            continue
        assert name in METRICS, f"{name} is neither in the catalogue nor a recording rule"
        quantity = METRICS[name]
        local_data = ALWAYS | ({quantity.label} - {""})
        labels |= local_data
        assert selected <= local_data, f"{name} has the labels {local_data}"
        if function in ("rate", "increase", "irate"):
            assert quantity.kind == COUNTER, f"{function} of {name}, which is a gauge"
        if function in ("avg_over_time", "max_over_time", "min_over_time", "quantile_over_time", "deriv", "delta"):
            assert quantity.kind != COUNTER, f"{function} of {name}, which is a counter"
    assert grouped_by(expression) <= labels | ADDED


def test_every_metric_is_shown_or_hidden_on_purpose():
    shown = {name for panel in PANELS for target in panel["targets"] for name, *_ in used_metrics(target["expr"])}
    annotated = {
        name for result in DASHBOARD["annotations"]["list"] for name, *_ in used_metrics(result.get("expr", ""))
    }
    hidden = {
        "hpcdist_collective_bytes_total",  # over its time, as hpcdist_collective_bytes_per_second
        "hpcdist_logged_value",  # only the script knows the names and ranges
        "hpcdist_data_seconds",  # of the last steps, as hpcdist_phase_seconds{phase="data"}
    }
    assert set(METRICS) - shown - annotated == hidden


def test_dashboard_can_be_imported():
    (source,) = DASHBOARD["__inputs"]
    assert (source["name"], source["type"], source["pluginId"]) == ("DS_PROMETHEUS", "datasource", "prometheus")
    assert DASHBOARD["id"] is None and DASHBOARD["uid"] and DASHBOARD["schemaVersion"] >= 36 and DASHBOARD["title"]
    needed = {result["id"] for result in DASHBOARD["__requires"]}
    assert {panel["type"] for panel in PANELS} | {"grafana", "prometheus"} <= needed
    used_sources = re.findall(r'"uid": "([^"]+)"', json.dumps([DASHBOARD["panels"], DASHBOARD["templating"]]))
    assert set(used_sources) == {"${DS_PROMETHEUS}"}
    assert [result["name"] for result in DASHBOARD["templating"]["list"]] == ["jobid", "run"]


def test_every_panel_selects_one_job_and_run():
    for panel in PANELS:
        for target in panel["targets"]:
            for _, labels, _ in used_metrics(target["expr"]):
                assert labels >= ALWAYS, f"{panel['title']}: {target['expr']}"
            assert re.findall(r"\$\w+", target["expr"]) and not re.search(
                r"\$(?!jobid|run|__rate_interval)", target["expr"]
            )


def test_panels_have_a_description_and_a_unit():
    units = {
        "none",
        "short",
        "s",
        "locale",
        "sci",
        "percentunit",
        "binBps",
        "bytes",
        "watt",
        "joule",
        "kwatth",
        "massg",
    }
    for panel in PANELS:
        defaults = panel["fieldConfig"]["defaults"]
        assert len(panel["description"]) > 20 and panel["description"].endswith("."), panel["title"]
        assert defaults["unit"] in units, panel["title"]
        assert defaults["thresholds"]["steps"][0]["value"] is None
        levels = [step["value"] for step in defaults["thresholds"]["steps"][1:]]
        assert levels == sorted(levels)
        for override in panel["fieldConfig"]["overrides"]:
            assert override["matcher"]["options"] in legends(panel), f"{panel['title']}: {override}"


def legends(panel):
    reference = {"phase": ("compute", "communication", "update", "data", "other")}
    result = set()
    for target in panel["targets"]:
        label = re.fullmatch(r"\{\{(\w+)\}\}", target["legendFormat"])
        result |= set(reference.get(label[1], ())) if label else {target["legendFormat"]}
    return result


def test_panel_units_match_the_metrics():
    right = {"s": {"s"}, "By": {"bytes"}, "By/s": {"binBps"}, "W": {"watt"}, "J": {"joule", "kwatth"}, "g": {"massg"}}
    for panel in PANELS:
        of_series = {
            override["matcher"]["options"]: result["value"]
            for override in panel["fieldConfig"]["overrides"]
            for result in override["properties"]
            if result["id"] == "unit"
        }
        for target in panel["targets"]:
            shown = of_series.get(target["legendFormat"], panel["fieldConfig"]["defaults"]["unit"])
            ((name, _, function),) = list(used_metrics(target["expr"]))
            if name == INFO:
                assert shown == "none", "what it says is in its labels"
                continue
            unit = METRICS[name].unit
            if function == "rate":
                unit = {"By": "By/s", "s": "1"}.get(unit, unit)
            assert shown in right.get(unit, {"none", "short", "locale", "sci", "percentunit", "ops"}), panel["title"]
            if METRICS[name].name.endswith("_ratio") and METRICS[name].name != "straggler_ratio":
                assert shown == "percentunit"


def test_ids_are_unique_and_panels_do_not_overlap():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells = []
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24 and place["h"] >= 1
        cells.append((panel["title"], place["x"], place["x"] + place["w"], place["y"], place["y"] + place["h"]))
    for (one, left, right, top, bottom), (other, west, east, north, south) in combinations(cells, 2):
        assert right <= west or east <= left or bottom <= north or south <= top, f"{one} overlaps {other}"
    tops = [panel["gridPos"]["y"] for panel in DASHBOARD["panels"]]
    assert tops == sorted(tops), "a panel belongs to the row before it"
    targets = [[target["refId"] for target in panel["targets"]] for panel in PANELS]
    assert all(len(set(names)) == len(names) for names in targets)


def test_alerts_use_known_rules_and_name_the_remedy():
    names = [rule["alert"] for rule in rules_of(ALERTS)]
    assert len(set(names)) == len(names) >= 7
    text = ALERTS.read_text()
    assert len(re.findall(r"severity: (?:critical|warning|info)\n", text)) == len(names)
    assert text.count("summary:") == text.count("description:") == len(names)
    assert all("energy" not in rule["expr"] and "power" not in rule["expr"] for rule in rules_of(ALERTS))


@pytest.fixture
def promtool():
    result = shutil.which("promtool")
    if result is None:
        pytest.skip("there is no promtool: apt-get install prometheus")
    return result


@cases(
    "arguments",
    ("check", "rules", "rules.yml", "alerts.yml"),
    ("test", "rules", "rules_test.yml"),
    ("check", "config", "--syntax-only", "prometheus.yml"),
    ids=" ".join,
)
@pytest.mark.full_except("check rules rules.yml alerts.yml")
def test_promtool_accepts_the_rules(promtool, arguments):
    done = jobs.run([promtool, *arguments], cwd=FOLDER)
    assert done.returncode == 0 and "SUCCESS" in done.stdout + done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("expression", ["vector(0) > 1", "max by (jobid, run) ({__name__=~'hpcdist_.+'}) > -1"])
@pytest.mark.full
def test_rule_tests_detect_broken_alerts(promtool, expression, tmp_path):
    """Alerts that never fire, and alerts that always fire, are both detected."""
    for path in FOLDER.glob("*.yml"):
        shutil.copy(path, tmp_path)
    text, alerts = ALERTS.read_text(), [rule["alert"] for rule in rules_of(ALERTS)]
    for name in alerts:
        body = re.search(rf"alert: {name}\n(?: +#.*\n)*( +)expr: (.*(?:\n\1 +.*)*)", text)
        assert body
        text = text.replace(body[2], expression)
    (tmp_path / "alerts.yml").write_text(re.sub(r"for: \d+m", "for: 0m", text))
    done = jobs.run([promtool, "test", "rules", "rules_test.yml"], cwd=tmp_path)
    assert done.returncode != 0
    assert [name for name in alerts if f"alertname: {name}" not in done.stdout + done.stderr] == []
