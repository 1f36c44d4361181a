"""Cache of measured selections: one JSON file per set of ranks, machines and kind of buffer.

The file name is a hash of the key: ranks by node, processors, fabric, MPI library and settings, kind and dtype of the
buffer. A file is ignored if its key does not match, or if it was measured on a busy machine that is idle now, is
unreadable, or could have been written by another user. No error in this module ends a job.
"""

import datetime
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from hpcdist.collectives.cost_model import LinkParameters, MachineCosts
from hpcdist.collectives.dispatch import AlgorithmTable, parse_algorithm
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import StorageError
from hpcdist.reporting import user_cache
from hpcdist.reporting.machine import load_average, processor

FORMAT: Final = 2
BUSY, IDLE = 0.5, 0.25  # load average per processor
TABLES: Final = "allreduce"  # the kind with a table of sizes; other kinds serve one size
LARGEST_SIZE: Final = "max_bytes"


@dataclass(frozen=True)
class TuningRow:
    """Tuning result for one buffer size: predicted and measured {algorithm: seconds}, and the chosen algorithm."""

    nbytes: int
    predicted: dict[str, float]
    measured: dict[str, float]
    chosen: str


@dataclass(frozen=True)
class Tuning:
    """Result of tuning a collective: the selected algorithms, the measured times, and the machine load."""

    text: str  # names the selected algorithms
    rows: tuple[TuningRow, ...] = ()
    machine: MachineCosts | None = None
    seconds: float = 0.0  # duration of the measurement
    source: str = "measured"  # or "cache", or "default" for a single rank
    note: str = ""
    load: float = 0.0  # highest `load_per_processor` of a node before the measurement
    created_utc: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), compare=False
    )

    @property
    def choice(self) -> AlgorithmTable:
        """The selected allreduce algorithms, as a table by buffer size."""
        return parse_algorithm(self.text)


def load_per_processor() -> float:
    """Return this node's load average divided by its number of processors, or NaN if unknown. Local."""
    return load_average() / (os.cpu_count() or 1)


def directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the tuning cache directory. Raises StorageError for a user without a home directory. Local."""
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
    """Return the cache key of a tuning result: a dict of all values on which the result depends.

    ``buffer``: "shared", "host" or "device". ``max_bytes``: largest tuned buffer size. Collective over ``everyone``.
    """
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
        "software": user_cache.software(),
    }


def _host() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        fabric = sorted({name.rstrip("0123456789_") for name in os.listdir("/sys/class/infiniband")})
    except OSError:
        fabric = []  # no InfiniBand, or hidden by a container
    return f"{processor()}; {cores} cores; {','.join(fabric) or 'no InfiniBand device'}"


def path_of(query: Mapping[str, Any]) -> Path:
    """Return the path of the cache file for the cache key ``query``. Raises StorageError, as `directory` does."""
    fixed = {name: value for name, value in query.items() if name != "software" and name not in _largest_size(query)}
    return directory() / f"{query['kind']}-{user_cache.digest(fixed)}.json"


def _largest_size(job_key: Mapping[str, Any]) -> tuple[str, ...]:
    return (LARGEST_SIZE,) if job_key["kind"] == TABLES else ()


def read(query: Mapping[str, Any], load_now: float) -> tuple[Tuning | None, str]:
    """Return (cached tuning or None, reason why the cache file is ignored or ""). ``query``: cache key. Local.

    ``load_now``: highest `load_per_processor` of all nodes. If all nodes are idle, a result from a busy machine is
    ignored.
    """
    try:
        path = path_of(query)
    except StorageError:
        return None, ""  # `save` reports it
    try:
        loaded = load(path)
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError) as error:
        return None, f"{path} is not used: {error}"
    stored_key, tuning = loaded
    other = [name for name in query if stored_key.get(name) != query[name] and name not in _largest_size(query)]
    if other == ["software"]:
        versions = f"it was measured with {stored_key.get('software')}, and this is {query['software']}"
        return None, f"{path} is not used: {versions}"
    if other or len(stored_key) != len(query):
        return None, f"{path} is not used: it is for other {', '.join(other) or 'keys'} than this job has"
    if any(
        not isinstance(stored_key.get(name), int) or stored_key[name] < query[name] for name in _largest_size(query)
    ):
        reaches = f"it reaches {stored_key.get(LARGEST_SIZE)} bytes, and this job has buffers of {query[LARGEST_SIZE]}"
        return None, f"{path} is not used: {reaches}"
    if tuning.load > BUSY and load_now < IDLE:
        return None, f"{path} is not used: it was measured on a busy machine, and the machine is idle now"
    return replace(tuning, source="cache"), ""


def load(path: Path) -> tuple[dict[str, Any], Tuning]:
    """Read the cache file ``path``. Return (cache key, tuning). Raises OSError or ValueError. Local."""
    try:
        content = json.loads(user_cache.read(path))
        if content["format"] != FORMAT:
            raise ValueError(
                f"the tuning cache file has format {content['format']}, but this version of hpcdist reads only format "
                f"{FORMAT}; remove the file"
            )
        return dict(content["key"]), _tuning(content)
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, UnicodeError) as error:
        raise ValueError(f"the tuning cache file is damaged ({type(error).__name__}); remove the file") from error
    except json.JSONDecodeError as error:
        raise ValueError("the tuning cache file is damaged (not valid JSON); remove the file") from error


def _tuning(content: Mapping[str, Any]) -> Tuning:
    parse_algorithm(content["text"])  # rejects algorithms that this version lacks
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


def content_of(tuning: Tuning, job_key: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON content of the cache file for ``tuning`` with the cache key ``job_key``, as a dict. Local."""
    machine = tuning.machine
    return {
        "format": FORMAT,
        "key": dict(job_key),
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


def save(tuning: Tuning, job_key: Mapping[str, Any]) -> Tuning:
    """Write ``tuning`` to the cache under ``job_key``. Return ``tuning``, with the reason of a failure in ``note``."""
    try:
        user_cache.write(path_of(job_key), content_of(tuning, job_key))
    except OSError as error:
        reason = f"the measurement is not kept: {error}"
        return replace(tuning, note="; ".join(filter(None, [tuning.note, reason])))
    return tuning


def clear() -> int:
    """Remove all cached tuning results and return their number. Local. Raises OSError."""
    files = [path for pattern in ("*.json", ".*.json.*.new") for path in directory().glob(pattern)]
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)
