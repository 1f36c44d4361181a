"""HDF5 files with versioned schemas, which survive a full disk and a killed writer.

Floor 1, and the only importer of h5py. Begin with `files.edit` and `overlay.Overlay`.
"""
