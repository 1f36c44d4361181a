"""The fields of a file that describes a cluster: what each is called there, its dimension, and between which bounds.

The bounds are wide: what lies outside of them is no hardware there is, but a unit that was mistaken.
"""

from typing import Final, NamedTuple


class Field(NamedTuple):
    """``key`` in the file is ``attribute`` of the section's class.

    ``kind``: a dimension of `hpcdist.planner.units`, or "count", "number", "text". Bounds include their ends, in base
    units; with ``zero`` 0 is allowed below them, too.
    """

    key: str
    attribute: str
    kind: str
    low: float = 0.0
    high: float = float("inf")
    required: bool = True
    zero: bool = False


YEAR_S: Final = 365.25 * 86400.0

TOP: Final = (
    Field("name", "name", "text"),
    Field("about", "about", "text"),
    Field("devices", "devices", "count", 1, 1e7),
    Field("calibrated", "calibrated", "text", required=False),
)
DEVICE: Final = (
    Field("name", "name", "text"),
    Field("memory", "memory_bytes", "bytes", 64e6, 64e12),
    Field("memory_bandwidth", "memory_bytes_per_s", "bandwidth", 100e6, 1e15),
    Field("memory_share", "memory_share", "number", 0.01, 1, required=False),
    Field("attention_share", "attention_share", "number", 0.001, 1, required=False),
    Field("kernel", "kernel_s", "time", 1e-9, 10e-3, required=False, zero=True),
    Field("reserved", "reserved_bytes", "bytes", 0, 1e12, required=False, zero=True),
    Field("idle", "idle_w", "power", 0, 5e3, required=False, zero=True),
    Field("peak", "peak_w", "power", 0.1, 20e3, required=False, zero=True),
    Field("best_mfu", "best_mfu", "number", 0.01, 1, required=False, zero=True),
)
FLOPS_BOUNDS: Final = (100e6, 1e18)
LEVEL: Final = (
    Field("name", "name", "text"),
    Field("devices", "devices", "count", 2, 1e7, zero=True),
    Field("latency", "latency_s", "time", 10e-9, 100e-3),
    Field("bandwidth", "bytes_per_s", "bandwidth", 1e6, 100e12),
    Field("alone_bandwidth", "alone_bytes_per_s", "bandwidth", 1e6, 100e12, required=False, zero=True),
)
NODE: Final = (
    Field("devices", "devices", "count", 1, 1024),
    Field("host", "host_w", "power", 1, 100e3, required=False, zero=True),
    Field("network", "network_w", "power", 1, 100e3, required=False, zero=True),
    Field("host_memory", "host_memory_bytes", "bytes", 64e6, 1e15, required=False, zero=True),
)
STORAGE: Final = (
    Field("write", "write_bytes_per_s", "bandwidth", 1e6, 1e15),
    Field("read", "read_bytes_per_s", "bandwidth", 1e6, 1e15),
    Field("node_write", "node_write_bytes_per_s", "bandwidth", 1e6, 1e13),
    Field("node_read", "node_read_bytes_per_s", "bandwidth", 1e6, 1e13),
)
FAILURES: Final = (
    Field("node_mtbf", "node_mtbf_s", "time", 3600, 1000 * YEAR_S),
    Field("restart", "restart_s", "time", 1, 86400),
)
SITE: Final = (
    Field("pue", "pue", "number", 1, 5, required=False),
    Field("carbon", "carbon_g_per_kwh", "carbon", 0, 2000, required=False, zero=True),
    Field("carbon_source", "carbon_source", "text", required=False),
    Field("device_hour_price", "device_hour_price", "number", 0, 1000, required=False, zero=True),
    Field("kwh_price", "kwh_price", "number", 0, 1000, required=False, zero=True),
    Field("currency", "currency", "text", required=False),
)
CURVE: Final = (  # lists, one number for each point
    Field("sizes", "sizes", "number", 1, 1e6),
    Field("shares", "shares", "number", 1e-6, 1),
)
FIT: Final = (
    Field("operation", "operation", "text"),
    Field("ranks", "ranks", "count", 1, 1e7),
    Field("algorithm", "algorithm", "text", required=False),
    Field("level", "level", "text", required=False),
    Field("library", "library", "text", required=False),
    Field("from", "from_bytes", "bytes", 0, 1e15, required=False, zero=True),
    Field("error", "error", "number", 0, 1e9, required=False, zero=True),
)
PIECES: Final = (  # of a fit: lists, one number for each piece
    Field("until", "until_bytes", "bytes", 1, 1e15),
    Field("latency", "latency_s", "time", 1e-9, 10, zero=True),
    Field("slowness", "s_per_byte", "slowness", 1e-15, 1e-3, zero=True),
)
OPERATIONS: Final = ("allreduce", "reduce_scatter", "all_gather", "message")
SECTIONS: Final = ("device", "node", "level", "storage", "failures", "site", "fit", "sources")
SOURCES: Final = ("device", "matmul", "node", "level", "storage", "failures", "site", "fit")
