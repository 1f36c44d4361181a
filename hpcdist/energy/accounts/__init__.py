"""Accounts of energy: joules by phase and activity, over the starts of a run, and as kWh, emissions and cost.

Begin with `attribution.Attribution` and `energy_metrics.figures`.
"""
