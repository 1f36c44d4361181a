"""Arrays: the only place that knows numpy from cupy, and the flat address space of a model."""
