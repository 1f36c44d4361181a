"""What a plan has to be read with: each flag once, decisive first, assumptions of a file in one line."""

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


def test_what_decides_comes_first():
    """In the words that the planner itself has for them."""
    layout = ParallelLayout(data=2000, context=2, microbatch=8, recompute="selective")
    found = plan(LLAMA, layout, SELENE, 20_001, 10)
    small = replace(found, memory=replace(found.memory, limit_bytes=1e9))
    notes = ("neither --steps nor --tokens is given: ...", *table.assumption_line(SELENE), *found.flags)
    flags = table.ordered((*notes, *table.layout_caveats(small), *notes), [layout])
    assert len(set(flags)) == len(flags)
    wanted = (
        *("it does not fit into the memory", "products larger than"),
        *(
            "'selective' is not built",
            "no training of this toolkit",
            "messages that hide",
            "20,001 samples on",
        ),
        *("neither --steps", "energy: assumption", "assumed in the file of a100-selene"),
    )
    places = [next(place for place, flag in enumerate(flags) if words in flag) for words in wanted]
    assert places == sorted(places)
    assert places[0] == 0 and places[-1] == len(flags) - 1


def test_assumptions_of_a_file_are_one_line():
    (line,) = table.assumption_line(SELENE)
    sections = {text.partition(":")[0] for text in toml_file.assumptions(SELENE)}
    assert len(sections) > 3 and all(section in line for section in sections)
    assert "`hpcdist plan clusters a100-selene` says what" in line
    (own,) = table.assumption_line(replace(SELENE, name="mine"))
    assert "[sources] in it says what" in own
    assert table.assumption_line(CLUSTER) == ()


def test_what_does_not_fit_is_a_flag():
    assert of(PLAIN) == ()
    short = replace(ESTIMATE.memory, limit_bytes=34 * GB)
    assert of(PLAIN, memory=short)[0].startswith("it does not fit into the memory: 34.0 GB (31.7 GiB) are missing")


@cases(
    "batch, data, size, said",
    (65, 64, 1, "65 samples on 64 replicas: 1 computes 2 micro-batches while the others, with 1, wait"),
    (130, 64, 1, "130 samples on 64 replicas: 2 compute 3 micro-batches while the others, with 2, wait"),
    (65, 64, 2, "65 samples on 64 replicas: 1 computes 2 samples while the others have 1"),
    (36, 4, 2, "9 samples of a replica in micro-batches of 2: the last one has 1"),
    (64, 64, 1, None),
    (128, 4, 8, None),
    (12, 4, 8, None),
)
def test_batches_that_do_not_divide(batch, data, size, said):
    assert of(replace(PLAIN, data=data, microbatch=size), batch) == ((said,) if said else ())


@cases(
    "asked, said",
    ({"tensor_overlap": 0.5}, "tensor_overlap = 0.5 has no effect with one tensor device"),
    ({"algorithm": "ring"}, "algorithm = ring has no effect with one replica"),
    ({"compression": "int8"}, "compression = int8 has no effect with one replica"),
)
def test_what_has_no_effect_is_told(asked, said):
    assert of(replace(PLAIN, **asked)) == (said,)
    assert of(replace(PLAIN, data=2, tensor=2, **asked)) == ()


def test_flags_of_rows_are_told_once():
    rows = [("all", "a of 5 s", "one"), ("all", "a of 6 s", "two"), ("all", "one")]
    assert table.by_row(rows, ("closed", "a of 6 s", "all")) == [
        "closed",
        "all",
        "row 1, and with other numbers 2: a of 5 s",
        "rows 1, 3: one",
        "row 2: two",
    ]
