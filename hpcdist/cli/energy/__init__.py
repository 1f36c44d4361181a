"""The `hpcdist energy` commands: energy counters of this machine, watts now, and the energy account of a run."""
