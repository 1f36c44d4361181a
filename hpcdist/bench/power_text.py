"""The report of a sweep over limits as lines for people, and as JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from hpcdist.bench import power_pareto as pareto
from hpcdist.bench.power_pareto import Candidate, Interval
from hpcdist.bench.power_report import DEVICES, Report, Row, label

MISSING: Final = "-"
_PREFIXES: Final = ((1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n"))


def jsonable(found: Report) -> dict[str, Any]:
    """Return the report as JSON values; what was not measured is null."""
    rows = [asdict(row) | {"joules": dict(row.joules), "reasons": dict(row.reasons)} for row in found.rows]
    values = {
        "provenance": dict(found.provenance),
        "configurations": rows,
        "recommendation": asdict(found.chosen),
        "notes": list(found.notes),
    }
    found_json: dict[str, Any] = json.loads(json.dumps(values), parse_constant=lambda name: None)  # NaN is not JSON
    return found_json


def text(path: Path, found: Report) -> str:
    """Return the table as lines for people, the recommendation, and what they have to know."""
    if not found.rows:
        return f"{path}: no trial has ended yet"
    head = [("results", str(path)), ("started", found.provenance.get("created_utc", ""))]
    head += [("limits of", found.provenance.get(DEVICES, "")), ("processor", found.provenance.get("processor", ""))]
    lines = [f"{name:10} {value}" for name, value in head if value]
    choice = f"recommended: {found.chosen.reason}" if found.chosen.name else found.chosen.reason
    return "\n".join([*lines, "", *table(found), "", choice, *found.notes])


def table(found: Report) -> list[str]:
    """Return head and rows as aligned lines; a column that no row fills is left out."""
    columns = _columns(found)
    cells = [
        [name for name, _ in columns],
        *([show for _, shown in columns for show in [shown[n]]] for n in range(len(found.rows))),
    ]
    filled = [n for n in range(len(columns)) if any(row[n] != MISSING for row in cells[1:])]
    cells = [[row[n] for n in filled] for row in cells]
    widths = [max(len(row[n]) for row in cells) for n in range(len(filled))]
    left = {0, len(filled) - 1, len(filled) - 2}
    return [
        "  ".join(f"{cell:{'<' if n in left else '>'}{widths[n]}}" for n, cell in enumerate(row)).rstrip()
        for row in cells
    ]


def _columns(found: Report) -> list[tuple[str, list[str]]]:
    rows = found.rows
    base = pareto.reference(found.candidates) if found.candidates else None
    joules, unit = _scaled([row.j_per_token for row in rows], "J")
    kinds = sorted({kind for row in rows for kind in row.joules})
    several = len({row.ranks for row in rows}) > 1
    return [
        ("configuration", [row.name for row in rows]),
        ("ranks", [str(row.ranks) if several else MISSING for row in rows]),
        ("W in force", [_shown(row.in_force_w, "g") for row in rows]),
        ("step ms", [_shown(row.step_s, ".2f", 1e3) for row in rows]),
        ("tokens/s", [_shown(row.tokens_per_s, ",.0f") for row in rows]),
        ("mean W", [_shown(row.mean_w, ".1f") for row in rows]),
        (f"{unit}/token", joules),
        ("run J", [_shown(row.total_j, ",.1f") for row in rows]),
        *((f"{kind} J", [_shown(row.joules.get(kind), ",.1f") for row in rows]) for kind in kinds if len(kinds) > 1),
        ("EDP J s", [_shown(row.edp_js, ".4g") for row in rows]),
        ("time", [_against(found, row, base, "time") for row in rows]),
        ("energy", [_against(found, row, base, "energy") for row in rows]),
        ("train loss", [_shown(row.train_loss, ".4f") for row in rows]),
        ("front", [row.verdict or MISSING for row in rows]),
        (
            "status",
            [", ".join([f"{row.ok} ok"] * (row.ok > 0) + [f"{row.failed} failed"] * (row.failed > 0)) for row in rows],
        ),
    ]


def _scaled(values: Sequence[Interval | None], unit: str) -> tuple[list[str], str]:
    """Return values with half of their intervals in percent, in the unit with the prefix that suits them."""
    known = [value.value for value in values if value is not None]
    scale, prefix = next((pair for pair in _PREFIXES if known and max(known) >= pair[0]), _PREFIXES[-1])
    return [
        MISSING if value is None else f"{value.value / scale:.4g}{_spread(value)}" for value in values
    ], prefix + unit


def _spread(value: Interval) -> str:
    if math.isnan(value.high):
        return ""
    percent = (value.high - value.low) / 2 / value.value * 100
    return " +-100 % or more" if percent >= 100 else f" +-{percent:.2g} %"


def _shown(value: float | None, form: str, scale: float = 1.0) -> str:
    return MISSING if value is None else format(value * scale, form)


def _against(found: Report, row: Row, base: Candidate | None, what: str) -> str:
    """Return how much more than the reference, in percent."""
    own = next((one for one in found.candidates if one.name == label(row, found.rows)), None)
    if base is None or own is None:
        return MISSING
    return "=" if own is base else f"{(pareto.ratio(own, base, what).value - 1) * 100:+.1f} %"
