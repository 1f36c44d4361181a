"""Save checkpoints: in two phases, incrementally, and in the background of the steps.

Below `hpcdist.training`; imports `format`, the directory and its lock. Begin with `two_phase.save_planned`
and `background.BackgroundCheckpoints`.
"""
