"""Site profiles: how the jobs of a cluster are submitted and started, and the resources of its nodes.

Start reading with `profile.SiteProfile` and `search.load`.
"""
