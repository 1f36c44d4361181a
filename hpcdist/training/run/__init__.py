"""Training loops, saving, stop requests, the job around them, and its summary.

May import `build`, `observe`, `data`, `recipe` and `chaos`; `entry_point` also imports `elastic`. Begin with
`job.TrainingJob` and `loop.TrainingLoop`.
"""
