"""Caveats of a plan: each flag once, most important first, assumptions of a file in one line."""

from dataclasses import replace

from harness.made_plans import CLUSTER, ESTIMATE, GB, LAYOUT
from harness.marks import cases
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model import transformer
from hpcdist.planner.model.transformer import describe
from hpcdist.planner.plan import plan
from hpcdist.planner.report import table

SELENE = toml_file.read("a100-selene")
LLAMA = describe(transformer.named("llama-2-7b"), "llama-2-7b")
PLAIN = replace(LAYOUT, data=1, pipeline=1, tensor=1, sequence_parallel=False, recompute="none")


def of(layout, batch=512, **more):
    return table.layout_caveats(replace(ESTIMATE, layout=layout, global_batch=batch, **more))


def test_most_important_flags_come_first():
    """The flags have the planner's own texts."""
    layout = ParallelLayout(data=2000, context=2, microbatch=8, recompute="selective")
    result = plan(LLAMA, layout, SELENE, 20_001, 10)
    small = replace(result, memory=replace(result.memory, limit_bytes=1e9))
    notes = ("neither --steps nor --tokens is given: ...", *table.assumption_line(SELENE), *result.flags)
    flags = table.ordered((*notes, *table.layout_caveats(small), *notes), [layout])
    assert len(set(flags)) == len(flags)
    expected = (
        *("the plan does not fit into the memory", "products larger than"),
        *(
            "'selective' is not built",
            "was never measured on this device",
            "messages that hide",
            "20,001 samples on",
        ),
        *("neither --steps", "energy: assumption", "assumed in the cluster file of a100-selene"),
    )
    places = [next(place for place, flag in enumerate(flags) if words in flag) for words in expected]
    assert places == sorted(places)
    assert places[0] == 0 and places[-1] == len(flags) - 1


def test_assumptions_of_a_file_use_one_line():
    (line,) = table.assumption_line(SELENE)
    sections = {text.partition(":")[0] for text in toml_file.assumptions(SELENE)}
    assert len(sections) > 3 and all(section in line for section in sections)
    assert "`hpcdist plan clusters a100-selene` prints the details" in line
    (local_data,) = table.assumption_line(replace(SELENE, name="mine"))
    assert "its section [sources] has the details" in local_data
    assert table.assumption_line(CLUSTER) == ()


def test_exceeded_memory_is_a_flag():
    assert of(PLAIN) == ()
    short = replace(ESTIMATE.memory, limit_bytes=34 * GB)
    assert of(PLAIN, memory=short)[0].startswith(
        "the plan does not fit into the memory: 34.0 GB (31.7 GiB) are missing"
    )


@cases(
    "batch, data, size, output",
    (65, 64, 1, "65 samples on 64 replicas: 1 replica computes 2 micro-batches, while the others compute 1 and wait"),
    (130, 64, 1, "130 samples on 64 replicas: 2 replicas compute 3 micro-batches, while the others compute 2 and wait"),
    (65, 64, 2, "65 samples on 64 replicas: 1 replica computes 2 samples, while the others compute 1"),
    (36, 4, 2, "9 samples per replica in micro-batches of 2: the last micro-batch has 1"),
    (64, 64, 1, None),
    (128, 4, 8, None),
    (12, 4, 8, None),
)
def test_uneven_batches_are_flagged(batch, data, size, output):
    assert of(replace(PLAIN, data=data, microbatch=size), batch) == ((output,) if output else ())


@cases(
    "asked, output",
    ({"tensor_overlap": 0.5}, "tensor_overlap = 0.5 has no effect with one tensor device"),
    ({"algorithm": "ring"}, "algorithm = ring has no effect with one replica"),
    ({"compression": "int8"}, "compression = int8 has no effect with one replica"),
)
def test_options_without_effect_are_flagged(asked, output):
    assert of(replace(PLAIN, **asked)) == (output,)
    assert of(replace(PLAIN, data=2, tensor=2, **asked)) == ()


def test_flags_of_several_rows_are_merged():
    rows = [("all", "a of 5 s", "one"), ("all", "a of 6 s", "two"), ("all", "one")]
    assert table.by_row(rows, ("closed", "a of 6 s", "all")) == [
        "closed",
        "all",
        "row 1, and with other numbers row 2: a of 5 s",
        "rows 1, 3: one",
        "row 2: two",
    ]
