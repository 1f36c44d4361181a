"""Packaging for sites: modulefiles and wheelhouses. No MPI is started here.

Part of `hpcdist.batch`, behind `hpcdist site modulefile` and `hpcdist site wheelhouse`; imports `batch.job` (the
folders of templates), reporting and errors.
Begin with `modulefile.render` and `wheelhouse.collect`.
"""
