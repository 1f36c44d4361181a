"""Search for the best layouts of a training on a cluster, by branch and bound.

Top of the planner: imports all of its other packages but `calibrate`. `space` enumerates layouts, `bounds` gives the
least value that a family can have, `branch_and_bound` prunes with it, `best_layouts` puts results into words. Begin
with `best_layouts.search` and `space.SearchSpec`.
"""
