"""Commands that examine a running or finished run.

Start reading with `report` (figures and HTML page of a run) and `inspect` (list, trace and hang).
"""
