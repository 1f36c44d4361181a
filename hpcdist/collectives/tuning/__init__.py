"""Selection of the allreduce algorithm by measurement, with a cost model and a cache on disk.

Floor 2: imports the algorithms of collectives, and comm. The cost model names the candidates for each size, a short
tournament measures them, and the result is cached for later starts. Begin with `autotune.select` and
`cost_model.FORMULAS`.
"""
