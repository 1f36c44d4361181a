"""Site profiles: how the jobs of a cluster are submitted and started, and what its nodes have.

Part of `hpcdist.batch`; imports its job, comm and errors, and is light: it is read on login nodes.
Begin with `profile.SiteProfile` and `search.load`.
"""
