"""The `hpcdist energy` commands: energy counters of this machine, watts now, and the energy account of a run.

`hpcdist.training.use_cases.energy_figures` computes the account. Start reading with `group` and `report`.
"""
