"""Measurements for `hpcdist plan calibrate`: products, copies, models, messages and collectives, as points.

Imports `bench.collectives` and `bench.step`. The fits are in `hpcdist.planner.calibrate`. Begin with
`device.CalibrationPoints` and `run.run`.
"""
