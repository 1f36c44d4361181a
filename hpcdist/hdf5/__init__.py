"""HDF5: the only importer of h5py. Files that survive a full disk and a killed writer, with versioned schemas."""
