"""The step as a list of operations: generators, and the executor that runs the list."""
