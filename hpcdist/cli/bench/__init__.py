"""The `hpcdist bench` commands: sweeps, steps, power, pipelines, collectives, checkpoints, data exchanges.

Part of `hpcdist.cli`, floor 7: it may import every package below. Measuring is done by `hpcdist.bench`; these modules
read options, start ranks or trials, and print. Heavy libraries are imported late.
Begin with `group` (the group, and sweeps) and `trials` (how trainings are started as trials).
"""
