"""Selection of the allreduce algorithm by measurement, with a cost model and a cache on disk.

Floor 2: imports the algorithms of collectives, and comm. Begin with `autotune.select` and `cost_model.FORMULAS`.
"""
