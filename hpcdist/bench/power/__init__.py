"""Sweep over power limits, clocks and recipe keys: time against energy, and a recommendation.

Builds on `bench.sweep`; its limits are set by `hpcdist.energy` through the command. Begin with `pareto.PowerAxes` and
`report.report`.
"""
