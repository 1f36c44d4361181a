"""The event stream in HDF5: figures by name over time, texts next to them, over several starts of a run."""

import numpy as np

from hpcdist.hdf5 import files
from hpcdist.telemetry.metrics import observations
from hpcdist.telemetry.metrics.step_metrics import SCHEMA, VERSION

S = 10**9


def event(kind, step, time_ns, values=()):
    return observations.RunEvent(kind, step, dict(values), time_ns=time_ns)


def write_events(path, session, *events):
    with files.edit(path, SCHEMA, VERSION) as file:
        observations.append(file, session, events)


def read_back(path):
    with files.open_read(path, SCHEMA, VERSION) as file:
        return observations.read(file)


def test_figures_and_texts_are_read_back(tmp_path):
    path = tmp_path / "metrics.h5"
    write_events(
        path, 0, event("begin", 0, 5 * S, {"world_ranks": 4}), event("step", 1, 6 * S, {"training_loss_nats": 3.0})
    )
    write_events(
        path, 0, event("memory", 3, 7 * S, {"memory_bytes[parameters]": 10.0, "memory_bytes[activations]": np.nan})
    )
    output = "step 4: loss 5.31, 6.2 deviations above ü" * 12
    write_events(path, 0, event("anomaly", 4, 8 * S, {"anomalies_total[loss_spike]": 1, "text": output}))
    result = read_back(path)
    assert list(result.series) == [
        "world_ranks", "memory_bytes[parameters]", "memory_bytes[activations]", "anomalies_total[loss_spike]"
    ]  # fmt: skip
    assert result.series["memory_bytes[parameters]"].value.tolist() == [10.0]
    assert np.isnan(result.series["memory_bytes[activations]"].value).all()
    assert result.series["anomalies_total[loss_spike]"].time_ns.tolist() == [8 * S]
    (note,) = result.notes
    assert (note.step, note.kind, note.name) == (4, "anomaly", "text")
    assert output.startswith(note.text) and len(note.text.encode()) > observations.TEXT_BYTES - 4


def test_file_without_observations_is_empty(tmp_path):
    path = tmp_path / "metrics.h5"
    write_events(path, 0)
    write_events(path, 0, event("step", 1, 6 * S, {"training_loss_nats": 3.0}))
    assert read_back(path) == observations.Observations()


def test_resume_drops_repeated_observations(tmp_path):
    path = tmp_path / "metrics.h5"
    write_events(
        path,
        0,
        *(event("checkpoint", step, step * S, {"checkpoint_seconds": step, "text": "saved"}) for step in (10, 20, 30)),
    )
    write_events(path, 1, event("begin", 20, 100 * S, {"world_ranks": 2}))
    write_events(path, 1, event("checkpoint", 25, 101 * S, {"checkpoint_seconds": 25}))
    result = read_back(path)
    assert result.series["checkpoint_seconds"].step.tolist() == [10, 20, 25]
    assert [note.step for note in result.notes] == [10, 20]


def test_long_series_are_thinned_except_at_their_ends(tmp_path):
    path = tmp_path / "metrics.h5"
    times = np.arange(0, 6 * 3600, 5)
    for some in np.array_split(times, 20):
        write_events(path, 0, *(event("memory", int(t), int(t) * S + 7, {"memory_bytes[all]": float(t)}) for t in some))
    write_events(
        path, 0, event("memory", times[-1] + 1, int(times[-1] + 1) * S, {"memory_bytes[all]": 1.0}), event("end", 1, 2)
    )
    kept = read_back(path).series["memory_bytes[all]"].time_ns // S
    apart = np.diff(kept)
    assert (apart[kept[:-1] < 400] == 5).all(), "the first minutes are all there"
    assert (apart[(kept[:-1] > 6000)][:-1] == 60).all()
    assert kept[-1] == times[-1] + 1, "and what was seen last"


def test_clock_that_is_set_back_is_tolerated(tmp_path):
    path = tmp_path / "metrics.h5"
    for step, second in enumerate((10_000, 20_000, 5, 8000)):
        write_events(path, 0, event("memory", step, second * S, {"memory_bytes[all]": float(step)}))
    assert read_back(path).series["memory_bytes[all]"].value.tolist() == [0, 1, 2, 3]
