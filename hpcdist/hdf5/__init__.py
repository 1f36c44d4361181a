"""HDF5: files that survive a full disk and a killed writer, with versioned schemas.

Floor 1: imports arrays, reporting and errors, and is the only importer of h5py. Nothing here depends on ranks or runs:
checkpoints, telemetry, energy and benchmarks write their files through it.
`tables` declares tables of metrics and appends rows to them.
Begin with `files.edit`, which changes a file in one transaction, and `overlay.Overlay`, which makes that safe.
"""
