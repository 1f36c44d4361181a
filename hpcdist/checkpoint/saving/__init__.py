"""Save checkpoints: in two phases, incrementally, and in the background of training.

Floor 5, inside checkpoint: imports `format`, the directory and its lock, comm and arrays. Used by `hpcdist.training`.
Start with `two_phase.save_planned` and `background.BackgroundCheckpoints`.
"""
