"""Registry of sinks: makes those that a recipe names, and imports no other."""

from collections.abc import Callable

from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.telemetry.sinks.stream import RunInfo, StreamSink


def build_sinks(run: RunInfo, config: TelemetryConfig, say: Callable[[str], None]) -> list[StreamSink]:
    """Return the sinks that ``config`` names, ready to be written to (rank 0 alone does).

    ``say`` tells a person where figures can be found. What keeps one from beginning is raised, with the cure, when
    those before it are closed again.
    """
    found: list[StreamSink] = []
    try:
        if config.jsonl:
            from hpcdist.telemetry.sinks.jsonl import FILE, JsonLines

            found.append(JsonLines(run, config))
            say(f"events: {run.directory / FILE}")
        if config.tensorboard:
            from hpcdist.telemetry.sinks import tensorboard

            found.append(tensorboard.TensorBoard(run, config))
            say(f"TensorBoard: {run.directory / tensorboard.DIRECTORY}")
        if config.prometheus != "off":
            from hpcdist.telemetry.sinks.prometheus import PrometheusSink

            prometheus = PrometheusSink(run, config)
            found.append(prometheus)
            say(f"Prometheus: {prometheus.where}")
    except BaseException:
        for sink in found:
            sink.close(False)
        raise
    return found
