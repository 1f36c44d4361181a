"""Measurements for `hpcdist plan calibrate`: matrix products, copies, model steps, messages and collectives.

Uses `bench.collectives` and `bench.step`. `hpcdist.planner.calibrate` fits the measurements. Start reading with
`device.CalibrationPoints` and `run.run`.
"""
