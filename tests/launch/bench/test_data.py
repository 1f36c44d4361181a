"""`hpcdist bench data` with real trainings: the same command reuses existing results."""

import json
import sys

import pytest

from harness import jobs
from hpcdist.bench.sweep import results

pytestmark = [pytest.mark.usefixtures("mpi"), pytest.mark.full]


def test_two_scenarios_are_compared_and_saved(tmp_path, rng):
    (tmp_path / "text.txt").write_text(" ".join(rng.choice(["some", "few", "words"], 2000)))
    (tmp_path / "base.toml").write_text(
        "model = {layers = 1, hidden = 32, heads = 2}\ndata = {path = 'text.txt', context = 16}\n"
        "run = {global_batch = 6, validation_samples = 8}\ncommunication = {algorithm = 'ring'}\n"
        "chaos = {step_s = 0.02}\nenergy = {sources = 'none'}\n"
    )
    line = [sys.executable, "-P", "-m", "hpcdist", "bench", "data", "--recipe", str(tmp_path / "base.toml"), "--json"]
    line += ["-n", "2", "--steps", "12", "--repeats", "1", "-o", str(tmp_path / "r.h5"), "--anonymous"]
    line += ["--contender", "allreduce", "--contender", "servers, bsp, 1 backup worker"]
    done = jobs.run(line)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    calm, late = document["rows"]
    assert (calm["scenario"], late["scenario"]) == ("calm", "stragglers")
    assert calm["loss_at_steps"] == late["loss_at_steps"], "the same run, but for time"
    assert 0 < late["x_first"] <= 1.0 and calm["bytes_sent_per_step"] > 0 and calm["pss_bytes"] > 0
    assert list(document["left_out"]) == ["servers, bsp, 1 backup worker"]
    result = results.read(tmp_path / "r.h5")
    assert "left_out" in result.provenance and "hosts" not in result.provenance
    step_s = {one.name.rpartition(" ")[2]: one.repeats[0].samples["compute_s"][1:, 0] for one in result.configurations}
    assert step_s["calm"].min() >= 0.02 and step_s["stragglers"].min() >= 0.06, "sleep never ends too early"
    again = jobs.run(line)
    assert again.returncode == 0 and json.loads(again.stdout)["rows"] == document["rows"] and "ok," not in again.stderr
