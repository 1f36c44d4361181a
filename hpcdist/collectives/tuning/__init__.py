"""Selection of the allreduce algorithm by measurement, with a cost model and a cache on disk.

Floor 2: imports the algorithms of collectives, and comm. The cost model proposes candidates for each size, a short
tournament measures them, and a cache stores the result. Begin with `autotune.select` and `cost_model.FORMULAS`.
"""
