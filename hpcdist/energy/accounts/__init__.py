"""Accounts of energy: joules by phase and activity, over the starts of a run, and as kWh, emissions and cost.

Floor 5, upper part of `hpcdist.energy`: pure computations on samples (`energy_metrics.read` reads a file); imports
comm.record, hdf5 and `report`. Begin with `attribution.Attribution` and `energy_metrics.figures`.
"""
