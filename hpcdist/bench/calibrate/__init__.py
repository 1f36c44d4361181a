"""Measurements for `hpcdist plan calibrate`: products, copies, models, messages and collectives, as points.

Imports `bench.collectives` and `bench.step`. The fits are in `hpcdist.planner.calibrate.line_fits`. Begin with
`points.CalibrationPoints` and `run.run`.
"""
