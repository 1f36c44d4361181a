"""Save checkpoints: in two phases, incrementally, and in the background of training.

Start with `two_phase.save_planned` and `background.BackgroundCheckpoints`.
"""
