"""The `hpcdist energy` commands: sources of this machine, watts now, and the account of a run.

Part of `hpcdist.cli`, floor 7: it may import every package below. The figures of a run's account come from
`hpcdist.training.use_cases.energy_figures`, which needs no click.
Begin with `group` (sources and watch) and `report`.
"""
