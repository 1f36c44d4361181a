"""Calibration of a cluster: fits of measured times of links, collectives and devices. Loads numpy.

Imports `cluster`, `model`, `time` and `layout` of the planner. `hpcdist.bench.calibrate.run.run` measures, `hpcdist
plan calibrate` passes the numbers from there to here. Begin with `cluster_fit.assemble` and `line_fits.fit_pieces`.
"""
