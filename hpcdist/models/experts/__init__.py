"""Mixture of experts: a router sends each token to a few of many feed-forwards (Shazeer et al., arXiv:1701.06538).

Start with `mixture.LocalExperts` and `router.RouterState`.
"""
