"""HTML page of a run: figures, charts and texts in one self-contained file.

Loads matplotlib to draw charts. Begin with `document.write_page` and `run_data.read`.
"""
