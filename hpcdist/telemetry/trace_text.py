"""What a trace tells, for a person: the critical path, what was hidden, who waited for whom, how the clocks went."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hpcdist.arrays.sizes import counted
from hpcdist.telemetry.ranklog import ranks_text, steps_text

SHOWN: Final = 8  # rows of a table
SOURCES: Final = {"measured": "round trips", "messages": "the ends of messages and collectives"}


def text(found: Mapping[str, Any]) -> str:
    """Return the lines about the `hpcdist.telemetry.trace.figures`."""
    lines = [_heading(found), *_path(found), *_communication(found), *_waits(found), *_clocks(found)]
    lines += [f"note       {note}" for note in found["notes"]]
    return "\n".join(lines)


def seconds(value: float | None) -> str:
    """Return a duration with a unit that suits it."""
    if value is None:
        return "not known"
    for least, unit, factor in ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (0.0, "us", 1e6)):
        if abs(value) >= least:
            return f"{value * factor:.3g} {unit}"
    raise AssertionError("unreachable")


def _percent(share: float | None) -> str:
    return "not known" if share is None else f"{share:.1%}"


def _heading(found: Mapping[str, Any]) -> str:
    steps = steps_text(found["steps"]) if found["steps"] else "no whole step"
    return f"{found['run']}: {steps} of {counted(len(found['ranks']), 'rank')} (of {found['world']})"


def _path(found: Mapping[str, Any]) -> list[str]:
    took = found["critical_path_s"]
    if not took:
        return ["critical path  not known: there is no whole step"]
    middle = sorted(took)[len(took) // 2]
    lines = [f"critical path  {seconds(middle)} a step (median of {len(took)})"]
    shares = [f"rank {rank} {_percent(share)}" for rank, share in list(found["critical_path_by_rank"].items())[:SHOWN]]
    lines.append(f"  by rank      {', '.join(shares)}, transfers {_percent(found['critical_path_transfer'])}")
    phases = found["critical_path_by_phase"].items()
    lines.append(f"  by phase     {', '.join(f'{name} {_percent(share)}' for name, share in phases)}")
    operations = list(found["critical_path_by_operation"].items())[:SHOWN]
    lines.append(f"  by operation {', '.join(f'{name} {_percent(share)}' for name, share in operations)}")
    return lines


def _communication(found: Mapping[str, Any]) -> list[str]:
    ranks = found["communication"]
    if not ranks:
        return []
    lines = ["communication  under way beside computing, exposed, of that waiting for others:"]
    rows = sorted(ranks.items(), key=lambda item: -item[1]["exposed_s"])
    for rank, one in rows[:SHOWN]:
        share = "" if one["hidden_share"] is None else f" ({_percent(one['hidden_share'])} hidden)"
        parts = [seconds(one[name]) for name in ("hidden_s", "exposed_s", "waited_s")]
        lines.append(f"  rank {rank:<7} {parts[0]:>9} {parts[1]:>9} {parts[2]:>9}{share}")
    if len(rows) > SHOWN:
        lines.append(f"  and {len(rows) - SHOWN} more ranks; --json lists them")
    return lines


def _waits(found: Mapping[str, Any]) -> list[str]:
    waited: Sequence[Mapping[str, Any]] = found["waited_s"]
    if not found["steps"]:
        return []
    if not waited:
        return ["waits          no rank waited for another"]
    blamed = list(found["waited_for_s"].items())[:SHOWN]
    each = f" ({seconds(found['wait_s_per_step'])} a step on each rank)"
    lines = [f"waited for     {', '.join(f'rank {rank} {seconds(s)}' for rank, s in blamed)}{each}"]
    lines += [f"  rank {one['rank']} for rank {one['for']}: {seconds(one['seconds'])}" for one in waited[:SHOWN]]
    lines.append("longest waits")
    lines += [
        f"  {seconds(one['seconds']):>9}  rank {one['rank']} in {one['in']} for rank {one['for']}, which was at "
        f"{one['doing']}"
        for one in found["longest_waits"]
    ]
    return lines


def _clocks(found: Mapping[str, Any]) -> list[str]:
    clocks = found["clocks"]
    if len(clocks) < 2:
        return ["clocks         one node: one clock"]
    order = found["order"]
    lines = [f"clocks         {counted(len(clocks), 'node')}; of {order['pairs']} causes, {order['wrong']} come late"]
    for clock in clocks[:SHOWN]:
        if clock["reference"]:
            what = "the reference"
        else:
            bound = "not known" if clock["bound_s"] is None else f"+-{seconds(clock['bound_s'])}"
            drift = "" if clock["drift_ppm"] is None else f", drift {clock['drift_ppm']:+.2f} ppm"
            ahead = "ahead" if clock["offset_s"] >= 0 else "behind"
            source = SOURCES.get(clock["source"], clock["source"])
            what = f"{seconds(abs(clock['offset_s']))} {ahead}, {bound}{drift}, by {source}"
        lines.append(f"  {clock['host']} ({ranks_text(clock['ranks'])}): {what}")
    if len(clocks) > SHOWN:
        lines.append(f"  and {len(clocks) - SHOWN} more nodes; --json lists them")
    return lines
