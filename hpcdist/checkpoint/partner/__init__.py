"""Partner copies: the state of each rank in memory, with a copy that outlives the death of the rank.

Floor 5, inside checkpoint: imports `format` for the layout of pieces, comm and arrays. Used by the elastic part of
`hpcdist.training`.
Begin with `redundancy.PartnerStore` and `redundancy.recover`.
"""
