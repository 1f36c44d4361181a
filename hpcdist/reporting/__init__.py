"""Reading and writing of small files, and formatting of numbers and host names, for all of hpcdist.

Floor 0: imports errors only, and nothing outside the standard library but matplotlib, late. Nothing here depends on
ranks, runs or formats. `atomic` and `regular` write and read files, `user_cache` keeps measurements for later starts,
`units`, `hostlist` and `table` format numbers, names and rows for reports, `figure` saves pictures.
Begin with `atomic.write`, which replaces a file, and `regular.read`, which reads a small one.
"""
