"""Products of data, pipeline and tensor ranks, small, that train on a GPU, the double or the real one.

Every schedule is there, every ZeRO stage inside of a pipeline with and without what it may keep, both ways to cut
activations over tensor ranks, dropout, recomputing, uneven micro-batches, and stages cut by measured seconds.
"""

STEPS = 2
SMALL: dict[str, object] = {
    "model.hidden": 8,
    "model.dropout": 0.2,
    "data.context": 5,
    "run.steps": STEPS,
    "run.global_batch": 6,
    "run.validation_samples": 2,
    "parallel.microbatches": 3,
}
PIPELINE: dict[str, object] = {**SMALL, "parallel.pipeline": 2}
KEEP_BOTH = {"zero.keep_gradients": "true", "zero.keep_parameters": "true"}
BY_ROWS = {"parallel.tensor": 2, "parallel.sequence_parallel": "true"}
# A product: its ranks, and its keys.
PRODUCTS: dict[str, tuple[int, dict[str, object]]] = {
    "interleaved, recomputing": (
        2,
        {**PIPELINE, "parallel.schedule": "interleaved", "parallel.chunks": 2, "parallel.recompute": "true"}
        | {"parallel.microbatches": 2},
    ),
    "tensor": (2, {**SMALL, "parallel.tensor": 2, "parallel.microbatches": 2}),
    "zb-v, tied": (2, {**PIPELINE, "parallel.schedule": "zb-v"}),
    "gpipe x zero3, kept": (4, {**PIPELINE, "parallel.schedule": "gpipe", "parallel.strategy": "zero3", **KEEP_BOTH}),
    "1f1b x zero2": (4, {**PIPELINE, "parallel.strategy": "zero2", "model.tied": "false"}),
    "zb-h2, measured": (2, {**PIPELINE, "parallel.schedule": "zb-h2", "parallel.partition": "measured"}),
    "zb-h1 x tensor by rows": (4, {**PIPELINE, "parallel.schedule": "zb-h1", **BY_ROWS}),
    "zero3 x tensor by rows": (4, {**SMALL, "parallel.strategy": "zero3", **BY_ROWS}),
    "zb-h1 x servers": (
        4,
        {**PIPELINE, "parallel.schedule": "zb-h1", "parallel.strategy": "parameter_server"}
        | {"parameter_server.placement": "colocated"},
    ),
}
