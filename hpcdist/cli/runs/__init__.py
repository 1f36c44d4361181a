"""Commands that look at a run, while it goes on or after it: report, trace and hang.

Part of `hpcdist.cli`, floor 7: it may import every package below. They read what the run keeps in its directory
(metrics, spans, flight recorder, checkpoints) and start no rank.
Begin with `report` (figures and the HTML page of a run) and `hang` (the rank that left the common path).
"""
