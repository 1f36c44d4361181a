"""Packaging for sites: modulefiles and wheelhouses. Needs no MPI.

Used by `hpcdist site`. Start reading with `modulefile.render` and `wheelhouse.collect`.
"""
