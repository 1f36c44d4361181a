"""HTML page of a run: figures, charts and texts in one self-contained file.

Imports hdf5, comm, arrays, reporting, errors and `telemetry.metrics`; loads matplotlib to draw charts. Begin with
`document.write_page` and `run_data.read`.
"""
