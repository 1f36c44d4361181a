"""Training loops, saving, stop requests, the job around them, and its summary.

May import `build`, `observe`, `data`, `recipe` and `chaos`; `entry_point`, called by `hpcdist train`, also imports
`elastic`. Begin with `job.TrainingJob` (start to end) and `loop.TrainingLoop` (step after step).
"""
