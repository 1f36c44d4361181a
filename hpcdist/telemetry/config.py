"""Configuration of telemetry: the ``[telemetry]`` section of a recipe. Imports only `reporting`."""

from dataclasses import dataclass
from typing import Final

from hpcdist.reporting.rules import check_section, finite, must, no_effect, one_of, rule

PROMETHEUS: Final = ("off", "textfile", "http", "push")
PORT: Final = 9464


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Section ``[telemetry]``: outputs of metrics in addition to ``metrics.h5``, and reports of anomalies.

    ``jsonl`` writes ``events.jsonl``, ``tensorboard`` event files. ``prometheus`` is "off", "textfile" (in
    ``textfile_directory``; default: ``prometheus`` in the run directory), "http" (on ``port`` of localhost; 0: any free
    port) or "push" (to the Pushgateway at ``gateway``, host:port). ``nvtx`` marks operations for profilers. ``trace``
    records the last operations of each rank for `hpcdist trace`.

    A loss is a spike if it exceeds the median of earlier losses by ``loss_spike`` robust standard deviations. A drop is
    a speed below (1 - ``throughput_drop``) of the earlier speed. 0 disables a check.
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
    must("telemetry.port", lambda port: 0 <= port <= 65535, "it must be between 0 (any free port) and 65535"),
    rule(
        "telemetry.gateway? where telemetry.prometheus=push",
        cure="it must be the host:port of a Pushgateway, such as 'login1:9091'",
        relation=lambda text: not _is_address(text),
    ),
    finite("telemetry.loss_spike", lambda spike: spike >= 0, "at least 0 (never)"),
    must("telemetry.throughput_drop", lambda drop: 0 <= drop < 1, "it must be at least 0 (never) and below 1"),
)
