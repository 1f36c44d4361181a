"""The run itself: the training loops, saving, stop requests, the job around them, and its summary.

It may import `build`, `observe`, `data`, `recipe` and `chaos`; `elastic` and `script` are built upon it, and
`entry_point`, which `hpcdist train` calls, imports `elastic`. Begin with
`job.TrainingJob` (start to end) and `loop.TrainingLoop` (step after step).
"""
