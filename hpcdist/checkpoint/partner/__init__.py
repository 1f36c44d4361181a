"""Partner copies: an in-memory copy of each rank's state that survives the death of the rank.

Floor 5, inside checkpoint: imports `format`, comm and arrays. Start with `redundancy.PartnerStore` and
`redundancy.recover`.
"""
