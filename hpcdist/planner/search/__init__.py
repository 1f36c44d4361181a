"""Search for the best layouts of a training on a cluster, by branch and bound.

`space` enumerates layouts, `bounds` computes lower bounds of families of layouts, `branch_and_bound` prunes with them,
`best_layouts` explains the results. Start reading with `best_layouts.search` and `space.SearchSpec`.
"""
