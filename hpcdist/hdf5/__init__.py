"""HDF5 files with versioned schemas, which survive a full disk and a killed writer.

Floor 1: imports arrays, reporting and errors, and is the only importer of h5py. Independent of ranks and runs.
`tables` declares tables of metrics. Begin with `files.edit`, which changes a file in one transaction, and
`overlay.Overlay`, which implements the transaction.
"""
