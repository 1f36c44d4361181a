"""Trace of a run: spans, messages and collectives of all ranks in some steps, on one clock.

Floor 5, inside telemetry: imports comm, arrays, reporting, errors and `hpcdist.telemetry.metrics`. `rank_log` reads the
files of each rank, `matching` pairs their calls, `clock_correction` makes one time, `timeline` and `critical_path` say
what decided a step; `chrome` and `plot` write files of it.
Begin with `summary.collect` and `timeline.build`.
"""
