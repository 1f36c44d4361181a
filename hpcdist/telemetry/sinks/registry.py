"""Registry of sinks: builds those that a recipe names, and imports no other."""

from collections.abc import Callable

from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.telemetry.sinks.stream import RunInfo, StreamSink


def build_sinks(run: RunInfo, config: TelemetryConfig, say: Callable[[str], None]) -> list[StreamSink]:
    """Return the sinks that ``config`` names, ready to be written to; for rank 0 alone.

    ``say`` gets a line for each on where its figures are. Where one cannot be built, those before it are closed and the
    error is raised.
    """
    sinks: list[StreamSink] = []
    try:
        if config.jsonl:
            from hpcdist.telemetry.sinks.jsonl import FILE, JsonLines

            sinks.append(JsonLines(run, config))
            say(f"events: {run.directory / FILE}")
        if config.tensorboard:
            from hpcdist.telemetry.sinks import tensorboard

            sinks.append(tensorboard.TensorBoard(run, config))
            say(f"TensorBoard: {run.directory / tensorboard.DIRECTORY}")
        if config.prometheus != "off":
            from hpcdist.telemetry.sinks.prometheus import PrometheusSink

            prometheus = PrometheusSink(run, config)
            sinks.append(prometheus)
            say(f"Prometheus: {prometheus.where}")
    except BaseException:
        for sink in sinks:
            sink.close(False)
        raise
    return sinks
