"""The `hpcdist bench` commands: sweeps of trainings, training steps, and collectives.

Part of `hpcdist.cli`, floor 7: may import every other package. The packages of `hpcdist.bench` measure; these modules
read options, start ranks or trials, and print. They import heavy libraries late. Begin with `group` (the command group
and sweeps) and `trials` (trainings as trials).
"""
