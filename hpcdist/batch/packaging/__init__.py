"""Packaging for sites: modulefiles and wheelhouses. No MPI is started here.

Part of `hpcdist.batch`, behind `hpcdist site modulefile` and `hpcdist site wheelhouse`; imports resources
and errors.
Begin with `modulefile.render` and `wheelhouse.collect`.
"""
