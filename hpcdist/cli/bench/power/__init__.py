"""The command `hpcdist bench power`: time against energy over power limits, clocks or keys of a recipe.

Part of `hpcdist.cli`, floor 7: it may import every package below.
Begin with `command` (the sweep) and `axes.LimitedDevices` (the devices whose limits it changes and restores).
"""
