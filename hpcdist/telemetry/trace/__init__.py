"""Trace of a run: spans, messages and collectives of all ranks in some steps, on one clock.

Imports comm, arrays, reporting, errors and `telemetry.metrics`. `rank_log` reads the files of each rank, `matching`
pairs calls, `clock_correction` aligns clocks, `timeline` and `critical_path` find the causes of waits; `chrome` and
`plot` write files. Begin with `summary.collect` and `timeline.build`.
"""
