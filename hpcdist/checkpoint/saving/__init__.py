"""Save checkpoints: in two phases, incrementally, and in the background of the steps.

Below `hpcdist.training`; imports `format`, the directory and its lock. Named `saving`, since
`hpcdist.checkpoint.save` is to be a function of the public API. Begin with `two_phase.save` and
`background.BackgroundCheckpoints`.
"""
