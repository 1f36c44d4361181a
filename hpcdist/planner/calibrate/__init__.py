"""Calibration of a cluster: fits to measured times of links, collectives and devices. Uses numpy.

`hpcdist.bench.calibration.run` measures; `hpcdist plan calibrate` connects both. Start reading with
`cluster_fit.assemble` and `line_fits.fit_pieces`.
"""
