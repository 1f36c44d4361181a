"""Mixture of experts: a router sends each token to a few of many feed-forwards (Shazeer et al., arXiv:1701.06538).

Floor 3, inside models: imports arrays, `hpcdist.models.layers` and `hpcdist.models.stage`. `router` chooses and
balances experts; `mixture` sorts tokens by expert and multiplies. Start with `mixture.LocalExperts` and
`router.RouterState`.
"""
