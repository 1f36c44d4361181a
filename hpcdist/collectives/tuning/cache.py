"""Cache of measured selections: one JSON file for each set of ranks, machines and kind of buffer.

The name of a file is a hash of its key: ranks by node, processors, fabric, MPI library, its settings, kind and type of
the buffer. The whole key stands in the file, with the versions of the software, and is compared. So does the greatest
size: a table of allreduces serves all jobs whose buffers are no larger. A file that does not fit, was measured beside
other work while the machine is idle now, cannot be read, or could have been written by somebody else is not used, and
the reason is reported. No error here ends a job.
"""

import datetime
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from hpcdist.collectives.dispatch import AlgorithmTable, parse_algorithm
from hpcdist.collectives.tuning.cost_model import LinkParameters, MachineCosts
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import StorageError
from hpcdist.reporting import user_cache
from hpcdist.reporting.machine import load_average, package_version, processor

FORMAT: Final = 2
BUSY, IDLE = 0.5, 0.25  # processes that want a processor, for each that there is
TABLES: Final = "allreduce"  # the kind that chooses by size; others are for one size
LARGEST_SIZE: Final = "max_bytes"
PACKAGES: Final = ("hpcdist", "mpi4py", "numpy")


@dataclass(frozen=True)
class TuningRow:
    """One size: seconds by algorithm, predicted and measured, and the algorithm that was chosen."""

    nbytes: int
    predicted: dict[str, float]
    measured: dict[str, float]
    chosen: str


@dataclass(frozen=True)
class Tuning:
    """Selected algorithms and their measurement. ``source`` is "measured", "cache", or "default" on a single rank.

    ``seconds`` is what the measurement took, this start's or that of the start that made the cache; ``load`` what
    `load_per_processor` said before it on the busiest node.
    """

    text: str
    rows: tuple[TuningRow, ...] = ()
    machine: MachineCosts | None = None
    seconds: float = 0.0
    source: str = "measured"
    note: str = ""
    load: float = 0.0
    created_utc: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), compare=False
    )

    @property
    def choice(self) -> AlgorithmTable:
        """The table that ``text`` stands for."""
        return parse_algorithm(self.text)


def load_per_processor() -> float:
    """Return the load average of this node for each of its processors, or NaN (local)."""
    return load_average() / (os.cpu_count() or 1)


def directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where the files are: hpcdist/tuning in XDG_CACHE_HOME, by default in ~/.cache (local).

    Raises StorageError for a user without a home directory.
    """
    return user_cache.directory("tuning", environment)


def key(
    everyone: Communicator,
    ranks_per_node: tuple[int, ...],
    library: str,
    kind: str,
    dtype: str,
    buffer: str,
    max_bytes: int,
) -> dict[str, Any]:
    """Return the key of a selection, with the versions of packages under "software". Collective over ``everyone``."""
    hosts = sorted(set(everyone.allgather_object(_host())))
    settings = user_cache.mpi_settings(os.environ, "HPCDIST_CUDA_AWARE")
    return {
        "ranks": everyone.size,
        "ranks_per_node": list(ranks_per_node),
        "hosts": hosts,
        "mpi_library": library,
        "settings": everyone.broadcast_object(settings),
        "kind": kind,
        "dtype": dtype,
        "buffer": buffer,
        "max_bytes": max_bytes,
        "software": {name: package_version(name, "not installed") for name in PACKAGES},
    }


def _host() -> str:
    """Return processor, cores and fabric of this rank as one line (local)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        fabric = sorted({name.rstrip("0123456789_") for name in os.listdir("/sys/class/infiniband")})
    except OSError:
        fabric = []  # none, or a container that hides it
    return f"{processor()}; {cores} cores; {','.join(fabric) or 'no InfiniBand device'}"


def path_of(wanted: Mapping[str, Any]) -> Path:
    """Return the file for ``wanted``, as `key` returned it (local). Raises StorageError as `directory` does."""
    fixed = {name: value for name, value in wanted.items() if name != "software" and name not in _largest_size(wanted)}
    return directory() / f"{wanted['kind']}-{user_cache.digest(fixed)}.json"


def _largest_size(wanted: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a key whose value may exceed that of the job: a table is for all sizes up to its greatest."""
    return (LARGEST_SIZE,) if wanted["kind"] == TABLES else ()


def read(wanted: Mapping[str, Any], load_now: float) -> tuple[Tuning | None, str]:
    """Return the stored selection for the key ``wanted``; else None, and why an existing file was not used (local).

    ``load_now`` is the `load_per_processor` of the busiest node.
    """
    try:
        path = path_of(wanted)
    except StorageError:
        return None, ""  # `save` reports it
    try:
        loaded = load(path)
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError) as error:
        return None, f"{path} is not used: {error}"
    stored_key, tuning = loaded
    other = [name for name in wanted if stored_key.get(name) != wanted[name] and name not in _largest_size(wanted)]
    if other == ["software"]:
        return (
            None,
            f"{path} is not used: it was measured with {stored_key.get('software')}, and this is {wanted['software']}",
        )
    if other or len(stored_key) != len(wanted):
        return None, f"{path} is not used: it is for other {', '.join(other) or 'keys'} than this job has"
    if any(
        not isinstance(stored_key.get(name), int) or stored_key[name] < wanted[name] for name in _largest_size(wanted)
    ):
        reaches = f"it reaches {stored_key.get(LARGEST_SIZE)} bytes, and this job has buffers of {wanted[LARGEST_SIZE]}"
        return None, f"{path} is not used: {reaches}"
    if tuning.load > BUSY and load_now < IDLE:
        return None, f"{path} is not used: it was measured beside other work, and the machine is idle now"
    return replace(tuning, source="cache"), ""


def load(path: Path) -> tuple[dict[str, Any], Tuning]:
    """Return key and result in a file (local). Raises OSError, or ValueError for any other file."""
    try:
        content = json.loads(user_cache.read(path))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']}, and this version reads {FORMAT}")
        return dict(content["key"]), _tuning(content)
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, UnicodeError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__})") from error
    except json.JSONDecodeError as error:
        raise ValueError("it is damaged (no JSON)") from error


def _tuning(content: Mapping[str, Any]) -> Tuning:
    parse_algorithm(content["text"])  # of algorithms that this version has
    machine = content["machine"]
    if machine is not None:
        links = {str(name): LinkParameters(float(a), float(b)) for name, (a, b) in machine["links"].items()}
        machine = MachineCosts(links, float(machine["reduce_s_per_byte"]))
    rows = tuple(
        TuningRow(int(row["nbytes"]), _seconds(row["predicted"]), _seconds(row["measured"]), str(row["chosen"]))
        for row in content["rows"]
    )
    return Tuning(
        content["text"],
        rows,
        machine,
        float(content["seconds"]),
        load=float(content["load"]),
        created_utc=str(content["created_utc"]),
    )


def _seconds(times: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(seconds) for name, seconds in times.items()}


def content_of(tuning: Tuning, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `load` reads: the result as JSON (local)."""
    machine = tuning.machine
    return {
        "format": FORMAT,
        "key": dict(wanted),
        "text": tuning.text,
        "created_utc": tuning.created_utc,
        "seconds": tuning.seconds,
        "load": tuning.load,
        "machine": None
        if machine is None
        else {
            "links": {name: [link.latency_s, link.s_per_byte] for name, link in machine.links.items()},
            "reduce_s_per_byte": machine.reduce_s_per_byte,
        },
        "rows": [
            {"nbytes": row.nbytes, "predicted": row.predicted, "measured": row.measured, "chosen": row.chosen}
            for row in tuning.rows
        ],
    }


def save(tuning: Tuning, wanted: Mapping[str, Any]) -> Tuning:
    """Write ``tuning`` for ``wanted`` and return it, with a note when it could not be written (local)."""
    try:
        user_cache.write(path_of(wanted), content_of(tuning, wanted))
    except OSError as error:
        reason = f"the measurement is not kept: {error}"
        return replace(tuning, note="; ".join(filter(None, [tuning.note, reason])))
    return tuning


def clear() -> int:
    """Remove all files of the cache, and return how many there were (local). Raises OSError."""
    files = [path for pattern in ("*.json", ".*.json.*.new") for path in directory().glob(pattern)]
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)
