"""Training loops, saving, stop requests, the job around them, its summary, and jobs that survive rank failures.

May import `build`, `observe`, `data` and `recipe`. Begin with `job.TrainingJob` and `loop.TrainingLoop`, or, for
`hpcdist run --survive`, with `elastic_job.ElasticJob` and `membership.Membership`.
"""
