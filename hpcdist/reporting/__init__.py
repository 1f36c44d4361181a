"""Files and texts as the whole of hpcdist reads and writes them.

Floor 0: imports errors only, and nothing outside the standard library. Nothing here knows of ranks, runs or formats.
`atomic` and `regular` write and read files, `user_cache` keeps measurements for later starts, `units` and `hostlist`
turn numbers and names into the text of a report and back.
Begin with `atomic.write`, which puts a file in the place of another, and `regular.read`, which reads a small one.
"""
