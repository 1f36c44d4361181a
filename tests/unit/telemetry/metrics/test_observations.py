"""The event stream in HDF5: figures by name over time, words beside them, over several starts of a run."""

import numpy as np

from hpcdist.hdf5 import files
from hpcdist.telemetry.metrics import observations
from hpcdist.telemetry.metrics.step_metrics import SCHEMA, VERSION

S = 10**9


def event(kind, step, time_ns, values=()):
    return observations.RunEvent(kind, step, dict(values), time_ns=time_ns)


def put(path, session, *events):
    with files.edit(path, SCHEMA, VERSION) as file:
        observations.append(file, session, events)


def got(path):
    with files.open_read(path, SCHEMA, VERSION) as file:
        return observations.read(file)


def test_figures_and_words(tmp_path):
    path = tmp_path / "metrics.h5"
    put(path, 0, event("begin", 0, 5 * S, {"world_ranks": 4}), event("step", 1, 6 * S, {"training_loss_nats": 3.0}))
    put(path, 0, event("memory", 3, 7 * S, {"memory_bytes[parameters]": 10.0, "memory_bytes[activations]": np.nan}))
    said = "step 4: loss 5.31, 6.2 deviations above ü" * 12
    put(path, 0, event("anomaly", 4, 8 * S, {"anomalies_total[loss_spike]": 1, "text": said}))
    found = got(path)
    assert list(found.series) == [
        "world_ranks", "memory_bytes[parameters]", "memory_bytes[activations]", "anomalies_total[loss_spike]"
    ]  # fmt: skip
    assert found.series["memory_bytes[parameters]"].value.tolist() == [10.0]
    assert np.isnan(found.series["memory_bytes[activations]"].value).all()
    assert found.series["anomalies_total[loss_spike]"].time_ns.tolist() == [8 * S]
    (note,) = found.notes
    assert (note.step, note.kind, note.name) == (4, "anomaly", "text")
    assert said.startswith(note.text) and len(note.text.encode()) > observations.TEXT_BYTES - 4


def test_a_file_without_any_has_none(tmp_path):
    path = tmp_path / "metrics.h5"
    put(path, 0)
    put(path, 0, event("step", 1, 6 * S, {"training_loss_nats": 3.0}))
    assert got(path) == observations.Observations()


def test_a_resume_drops_what_is_made_again(tmp_path):
    path = tmp_path / "metrics.h5"
    put(
        path,
        0,
        *(event("checkpoint", step, step * S, {"checkpoint_seconds": step, "text": "saved"}) for step in (10, 20, 30)),
    )
    put(path, 1, event("begin", 20, 100 * S, {"world_ranks": 2}))
    put(path, 1, event("checkpoint", 25, 101 * S, {"checkpoint_seconds": 25}))
    found = got(path)
    assert found.series["checkpoint_seconds"].step.tolist() == [10, 20, 25]
    assert [note.step for note in found.notes] == [10, 20]


def test_a_month_is_thin_and_its_begin_and_end_are_not(tmp_path):
    path = tmp_path / "metrics.h5"
    times = np.arange(0, 6 * 3600, 5)
    for some in np.array_split(times, 20):
        put(path, 0, *(event("memory", int(t), int(t) * S + 7, {"memory_bytes[all]": float(t)}) for t in some))
    put(path, 0, event("memory", times[-1] + 1, int(times[-1] + 1) * S, {"memory_bytes[all]": 1.0}), event("end", 1, 2))
    kept = got(path).series["memory_bytes[all]"].time_ns // S
    apart = np.diff(kept)
    assert (apart[kept[:-1] < 400] == 5).all(), "the first minutes are all there"
    assert (apart[(kept[:-1] > 6000)][:-1] == 60).all()
    assert kept[-1] == times[-1] + 1, "and what was seen last"


def test_a_clock_put_back_does_not_end_it(tmp_path):
    path = tmp_path / "metrics.h5"
    for step, second in enumerate((10_000, 20_000, 5, 8000)):
        put(path, 0, event("memory", step, second * S, {"memory_bytes[all]": float(step)}))
    assert got(path).series["memory_bytes[all]"].value.tolist() == [0, 1, 2, 3]
