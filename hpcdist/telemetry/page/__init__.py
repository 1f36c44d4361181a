"""HTML page of a run: figures, charts and words in one file that needs nothing else.

Floor 5, inside telemetry: imports hdf5, comm, arrays, reporting, errors and `hpcdist.telemetry.metrics`. `run_data`
reads the directory of the run with `energy_data` and `history`; `key_figures` and `charts` show it, and `document`
makes the file. matplotlib is loaded when charts are drawn.
Begin with `document.write_page` and `run_data.read`.
"""
