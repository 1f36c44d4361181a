"""Accounts of energy: joules by phase, by activity, over the starts of a run, and as kWh, emissions and cost.

Upper part of `hpcdist.energy`: pure computations on samples (and `history`, which reads them from a file); imports
comm.spans, hdf5 and `report`, no sensor.
Begin with `attribution.Attribution` and `energy_metrics.figures`.
"""
