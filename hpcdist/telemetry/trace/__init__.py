"""Trace of a run: spans, messages and collectives of all ranks in some steps, on one clock.

`rank_log` reads the files of each rank, `matching` pairs calls, `clock_correction` aligns clocks, `timeline` and
`critical_path` find the causes of waits. Begin with `summary.collect` and `timeline.build`.
"""
