"""Configuration of telemetry: the ``[telemetry]`` section of a recipe. Imports nothing but `reporting`."""

from dataclasses import dataclass
from typing import Final

from hpcdist.reporting.rules import check_section, finite, must, no_effect, one_of, rule

PROMETHEUS: Final = ("off", "textfile", "http", "push")
PORT: Final = 9464


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Section ``[telemetry]``: the sinks of a run's figures beside ``metrics.h5``, and those that are printed.

    ``jsonl`` writes ``events.jsonl``, ``tensorboard`` event files, both into the run directory. ``prometheus`` is
    "off", "textfile" (for a node_exporter that looks into ``textfile_directory``; "": the directory ``prometheus`` of
    the run), "http" (an exporter on ``port`` of this machine's own address, 0: any free one) or "push" (to the
    Pushgateway at ``gateway``, host:port). ``nvtx`` marks the operations of a step for profilers. ``trace`` keeps the
    last operations of each rank with their times, for `hpcdist trace`.

    A loss is reported as a spike where it is more than ``loss_spike`` robust standard deviations above the median of
    those before (0: never); a drop of throughput, where tokens/s are below (1 - ``throughput_drop``) of what they were
    (0: never).
    """

    jsonl: bool = False
    tensorboard: bool = False
    prometheus: str = "off"
    textfile_directory: str = ""
    port: int = PORT
    gateway: str = ""
    nvtx: bool = False
    trace: bool = True
    loss_spike: float = 5.0
    throughput_drop: float = 0.5

    def __post_init__(self) -> None:
        check_section(RULES, "telemetry", self)


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) <= 65535


RULES: Final = (
    one_of("telemetry.prometheus", PROMETHEUS),
    *(
        no_effect(f"telemetry.{name}", getattr(TelemetryConfig, name), "telemetry.prometheus", [mode])
        for name, mode in (("textfile_directory", "textfile"), ("port", "http"), ("gateway", "push"))
    ),
    must("telemetry.port", lambda port: 0 <= port <= 65535, "it must be between 0 (any free one) and 65535"),
    rule(
        "telemetry.gateway? where telemetry.prometheus=push",
        cure="it must be the host:port of a Pushgateway, such as 'login1:9091'",
        relation=lambda text: not _is_address(text),
    ),
    finite("telemetry.loss_spike", lambda spike: spike >= 0, "at least 0 (never)"),
    must("telemetry.throughput_drop", lambda drop: 0 <= drop < 1, "it must be at least 0 (never) and below 1"),
)
