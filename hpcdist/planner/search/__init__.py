"""Search for the best layouts of a training on a cluster, by branch and bound.

Start reading with `best_layouts.search` and `space.SearchSpec`.
"""
