"""Packaging for sites: modulefiles and wheelhouses. Needs no MPI.

Start reading with `modulefile.render` and `wheelhouse.collect`.
"""
