"""`hpcdist doctor --job`: passing and failing cases of each check on synthetic rows, and messages between threads."""

import dataclasses
import errno
import json
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.jobs import run
from harness.marks import cases
from hpcdist.batch.schedulers import slurm
from hpcdist.batch.schedulers.base import JobState
from hpcdist.checkpoint import stripe
from hpcdist.cli.doctor import command, job
from hpcdist.comm.doctor import binding_checks, facts, gather, job_checks
from hpcdist.comm.doctor.facts import GpuFacts, NodeFacts, RankFacts, SchedulerRequest, Volume
from hpcdist.comm.doctor.job_checks import (
    NODE_LOCAL,
    RUN_DIRECTORY,
    SHARED_MEMORY,
    Greeting,
    RankRow,
    RankTable,
)
from hpcdist.comm.doctor.mpi_library import FAIL, OK, WARN
from hpcdist.comm.launch.environment import LaunchEnvironment
from hpcdist.comm.record.clock_offsets import ClockReading
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import CommunicationError, ConfigurationError, DeadlineError, MissingCapabilityError, UsageError
from hpcdist.reporting.units import fold_names, format_ranges, group_texts, parse_ranges

GIB = 1 << 30
GREETING = Greeting(arrived=True, inside_s=2e-6, across_s=5e-6, reduced_s=8e-6)
FACTS = RankFacts("n1", (0,), None, "1", "srun", None, None, GpuFacts(None, 0, "", "no driver"))
VOLUMES = tuple(
    Volume(role, path, kind, 100 * GIB)
    for role, path, kind in (
        (RUN_DIRECTORY, "/scratch/run", "lustre"),
        (NODE_LOCAL, "/tmp", "xfs"),
        (SHARED_MEMORY, "/dev/shm", "tmpfs"),
    )
)
MACHINE = NodeFacts("A CPU", 8, ((0, 1, 2, 3), (4, 5, 6, 7)), {"hpcdist": "1", "numpy": "2", "MPI": "3"}, {}, VOLUMES)


def table(nodes=1, ranks=2, machines=None, **facts):
    """Return a table of ``nodes`` x ``ranks`` rows. A callable in ``facts`` is called with the node and local rank."""
    rows = []
    for node in range(nodes):
        for local in range(ranks):
            local_values = {name: value(node, local) if callable(value) else value for name, value in facts.items()}
            machine = (MACHINE if machines is None else machines[node]) if local == 0 else None
            given = dataclasses.replace(FACTS, **{"host": f"n{node + 1}", "cores": (local,), **local_values})
            rows.append(RankRow(node, local, given, GREETING, machine))
    return RankTable(rows)


def machines(*changes):
    return [dataclasses.replace(MACHINE, **change) for change in changes]


# -- words


def test_core_ranges_are_formatted_and_parsed():
    assert [format_ranges(cores) for cores in [(), (3,), (0, 1, 2, 5), (0, 2, 3)]] == ["", "3", "0-2,5", "0,2-3"]
    assert [parse_ranges(text) for text in ["", "3\n", "0-2,5"]] == [(), (3,), (0, 1, 2, 5)]


@cases(
    "names, folded",
    (["n1"], "n1"),
    (["n1", "n2", "n4"], "n[1-2,4]"),
    (["n10", "n9", "n8", "n8"], "n[8-10]"),
    (["n08", "n09", "n10"], "n[08-10]"),
    (["x1000c0s1b0n0", "x1000c0s1b0n1", "login"], "x1000c0s1b0n[0-1],login"),
    ([f"n{k:04}" for k in range(1, 1001)], "n[0001-1000]"),
)
def test_host_names_are_folded_to_ranges(names, folded):
    assert fold_names(names) == folded


def test_common_text_of_many_nodes_is_printed_once():
    nodes = [f"n{k}" for k in range(1000)]
    assert group_texts(nodes, ["fine"] * 1000) == "fine"
    assert group_texts(nodes, ["old" if k == 7 else "" for k in range(1000)]) == "n7: old"
    assert group_texts(nodes, ["new" if k % 500 else "old" for k in range(1000)]) == (
        "n[1-499,501-999]: new; n[0,500]: old"
    )
    shown = group_texts(nodes, [str(k) for k in range(1000)])
    assert shown.endswith("and 994 more, each otherwise") and len(shown) < 100


# -- the world


@cases(
    "asked, status, words",
    (SchedulerRequest(""), OK, "no scheduler; 4 ranks on 2 nodes (2 on each)"),
    (SchedulerRequest("Slurm", 4, 2), OK, "4 ranks on 2 nodes (2 on each); Slurm was asked for 4 tasks on 2 nodes"),
    (SchedulerRequest("Slurm", 8, 2), WARN, "8 tasks"),
    (SchedulerRequest("Slurm", 4, 3), WARN, "3 nodes"),
    (SchedulerRequest("Slurm", 2, 1), OK, "2 tasks on 1 node"),  # more ranks than tasks: on purpose
    (SchedulerRequest("Slurm"), OK, "an unknown number of tasks"),
)
def test_world_size_is_compared_with_scheduler_request(asked, status, words):
    check = job_checks.check_size(table(nodes=2), asked)
    assert check.status == status and words in check.found and bool(check.cure) is (status != OK)


def test_single_rank_in_job_of_many_tasks_hints_at_separate_worlds():
    assert "each is its own world" in job_checks.check_size(table(ranks=1), SchedulerRequest("Slurm", 4, 1)).cure
    assert "each is its own world" not in job_checks.check_size(table(ranks=2), SchedulerRequest("Slurm", 4, 1)).cure


SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "5"}


@cases(
    "environment, asked",
    ({}, SchedulerRequest("")),
    (BATCH, SchedulerRequest("Slurm", 5, 2)),
    (BATCH | {"SLURM_NTASKS_PER_NODE": "4"}, SchedulerRequest("Slurm", 8, 2)),
    (BATCH | SRUN | {"SLURM_NTASKS_PER_NODE": "9", "SLURM_NTASKS": "4"}, SchedulerRequest("Slurm", 4, 2)),
    (BATCH | SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}, SchedulerRequest("Slurm", None, 2)),
    (BATCH | {"SLURM_GPUS_ON_NODE": "4"}, SchedulerRequest("Slurm", 5, 2, True)),
    (BATCH | {"SLURM_HET_SIZE": "2"}, SchedulerRequest("Slurm, for a heterogeneous job,")),
    ({"PBS_NODEFILE": "/no/such/file"}, SchedulerRequest("PBS")),
)
def test_scheduler_request_is_read_from_environment(environment, asked):
    assert facts.scheduler_request(LaunchEnvironment("Slurm srun", 4, 1, 1), environment) == asked


def test_pbs_nodefile_has_one_line_per_task(tmp_path):
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    assert facts.scheduler_request(None, {"PBS_NODEFILE": str(tmp_path / "nodes")}) == SchedulerRequest("PBS", 4, 2)


def test_damaged_messages_fail_and_name_the_rank():
    good = table(nodes=2)
    assert job_checks.check_messages(good).found.startswith("inside a node 2.0 us, slowest 2.0")
    bad = RankTable([dataclasses.replace(row, greeting=Greeting(rank != 3, None, None, 1e-6))
                 for rank, row in enumerate(good.rows)])  # fmt: skip
    check = job_checks.check_messages(bad)
    assert check.status == FAIL and check.found.endswith("rank 3")


def test_slowest_rank_is_reported_with_its_node():
    rows = [dataclasses.replace(row, greeting=dataclasses.replace(GREETING, across_s=1e-6 * (1 + 98 * (rank == 2))))
            for rank, row in enumerate(table(nodes=2).rows)]  # fmt: skip
    assert "between nodes 1.0 us, slowest 99.0 (rank 2 on n2)" in job_checks.check_messages(RankTable(rows)).found


# -- binding


@cases(
    "facts, status, words",
    ({"announced": lambda node, local: local, "slurm_local": lambda node, local: local}, OK, "agree"),
    ({"announced": None}, OK, "agree"),
    ({"announced": lambda node, local: 1 - local}, OK, "agree"),  # --map-by numa numbers them so
    ({"announced": lambda node, local: 1 + local}, FAIL, "srun numbers the 2 ranks of the node 1 2"),
    ({"slurm_local": 0}, WARN, "SLURM_LOCALID numbers the 2 ranks of the node 0 0"),
)
def test_local_rank_numbering_is_checked(facts, status, words):
    check = binding_checks.check_local_ranks(table(nodes=2, **facts))
    assert check.status == status and words in check.found and bool(check.cure) is (status != OK)


def gpus(count, visible=None, name=lambda local: f"0000:0{local}:00.0"):
    return {"gpu": lambda node, local: GpuFacts(visible, count, name(local))}


NO_GPU = {"gpu": GpuFacts(None, 0, "", "no driver")}


@cases(
    "facts, expected, held, status, words",
    (NO_GPU, "", False, OK, "none: no driver"),
    (NO_GPU, "cpu", True, OK, "none: no driver"),
    (NO_GPU, "", True, WARN, "the job holds GPUs"),
    (NO_GPU, "gpu", False, FAIL, "no rank sees a GPU: no driver"),
    (gpus(2), "gpu", True, OK, "one for each rank: 0000:00:00.0, 0000:01:00.0"),
    (gpus(1, "0"), "gpu", True, WARN, "the ranks use 2 GPUs, and see only 1 each (CUDA_VISIBLE_DEVICES=0)"),
    (gpus(1), "gpu", True, WARN, "hidden by the system"),
    (gpus(1, name=lambda local: "0000:00:00.0"), "gpu", True, WARN, "2 ranks on 1 GPU"),
    (gpus(4, name=lambda local: "0000:00:00.0"), "", False, WARN, "2 ranks on 1 GPU"),
)
def test_gpus_of_ranks_are_checked(facts, expected, held, status, words):
    check = binding_checks.check_gpus(table(nodes=2, **facts), expected, held)
    assert check.status == status and words in check.found and bool(check.cure) is (status != OK)
    assert "n1" not in check.found, "all nodes have the same finding"


@pytest.mark.parametrize(("expected", "status"), [("gpu", FAIL), ("", WARN), ("cpu", OK)])
def test_nodes_without_gpu_are_reported(expected, status):
    rows = table(nodes=3, gpu=lambda node, local: GpuFacts(None, 2 * (node != 1), f"{local}", "driver too old"))
    check = binding_checks.check_gpus(rows, expected, job_has_gpus=False)
    assert check.status == status
    if status != OK:
        assert check.found == "n2: 2 of 2 ranks without a GPU: driver too old"


def cores(*sets, **more):
    return {"cores": lambda node, local: sets[local], "ranks": len(sets), **more}


@cases(
    "facts, status, words",
    (cores((0,), (1,)), OK, "1 core each: 0 | 1; OMP_NUM_THREADS=1"),
    (cores((0, 1), (0, 1)), OK, "2 ranks on all of 0-1, which they share"),
    (cores((0,), (0,), (1, 2)), FAIL, "the same core (0), although the job has 3"),
    (cores((0,), (0,)), WARN, "2 ranks on 1 core"),  # the job has no other core
    (cores((0, 1), (0, 1), (0, 1)), WARN, "3 ranks on 2 cores"),
    (cores((0,), (1,), cores_asked=2), WARN, "may use 1 core, and 2 were asked for"),
    (cores((0, 1), (2, 3), cores_asked=2), OK, "0-1 | 2-3"),
    (cores((0,), (1,), threads="2"), WARN, "2 threads on 1 core of a rank (OMP_NUM_THREADS=2)"),
    (cores((0, 1), (2, 3), threads="2"), OK, "OMP_NUM_THREADS=2"),
    (cores((0, 1), (0, 1), threads=None), WARN, "4 threads of 2 ranks on 2 cores (OMP_NUM_THREADS is unset)"),
    (cores((0, 1), (2, 3), threads=None), OK, "0-1 | 2-3"),
    (cores((0, 1), (3, 4), (6, 7)), WARN, "1 of 3 ranks lie across memory domains (cores 3-4)"),
    (cores((0, 1), (2, 3), (6, 7)), OK, "0-1 | 2-3 | 6-7"),
    (cores((3, 4), (2, 5)), OK, "3-4 | 2,5"),  # all ranks cross domains, so the binding was requested
    (cores(tuple(range(6)), (6, 7)), OK, "2 to 6 cores each: 0-5 | 6-7"),  # no domain has room for six
    (cores((0, 1, 2), (2, 3, 4)), WARN, "several of 2 ranks share cores 2 of 0-4"),
    (cores((0, 1), (0, 1), (2, 3)), WARN, "several of 3 ranks share cores 0-1 of 0-3"),
)
def test_core_binding_is_checked(facts, status, words):
    check = binding_checks.check_cores(table(nodes=2, **facts))
    assert check.status == status and words in check.found and bool(check.cure) is (status != OK)


@cases(
    "facts, status, words",
    (cores((0, 1), (0, 1)), WARN, "2 ranks share all 2 cores (0-1), none is bound"),
    (cores((0, 1)), OK, "1 rank on all of 0-1"),
    (cores((0, 1), (0, 1), (0, 1)), WARN, "3 ranks on 2 cores"),
    (cores((0, 1), (2, 3)), OK, "2 cores each: 0-1 | 2-3"),
)
def test_unbound_ranks_of_a_job_give_warning(facts, status, words):
    check = binding_checks.check_cores(table(nodes=2, **facts), "Slurm")
    assert check.status == status and words in check.found and bool(check.cure) is (status != OK)


@cases(
    "facts, status, words",
    (cores((0, 4), (1, 5)), OK, "1 core each: 0,4 | 1,5"),
    (cores((0, 1, 4, 5), (2, 3, 6, 7)), OK, "2 cores each: 0-1,4-5 | 2-3,6-7"),
    (cores((0,), (4,)), WARN, "2 ranks on 1 core (2 hardware threads)"),
    (cores((0, 1), (4, 5)), WARN, "several of 2 ranks are bound to hardware threads of the same cores (0-1)"),
    (cores((0, 4), (0, 4)), WARN, "2 ranks on 1 core (2 hardware threads)"),
)
def test_cores_with_two_hardware_threads_are_checked(facts, status, words):
    threads = machines({"numa": (), "hardware_threads": tuple((core, core + 4) for core in range(4))}) * 2
    check = binding_checks.check_cores(table(nodes=2, machines=threads, **facts))
    assert check.status == status and words in check.found and bool(check.cure) is (status != OK)


def test_core_check_passes_without_numa_domains():
    flat = machines({"numa": ()})
    assert binding_checks.check_cores(table(machines=flat, **cores((0, 1), (3, 4), (6, 7)))).status == OK


# -- nodes


@cases(
    "offsets, status, words",
    ([ClockReading(0, 0, 0, 0)], OK, "one node"),
    (
        [ClockReading(0, 0, 0, 0), ClockReading(0, 0, 250000000, 2000000), ClockReading(0, 0, -500000000, 4000000)],
        OK,
        "500.000 ms apart, to within 2.000 ms",
    ),
    (
        [ClockReading(0, 0, 0, 0), ClockReading(0, 0, 3000000000, 2000000), ClockReading(0, 0, 3000000000, 4000000)],
        WARN,
        "n[2-3]: 3.0 s ahead of the first node",
    ),
    (
        [ClockReading(0, 0, 0, 0), ClockReading(0, 0, 0, 2000000), ClockReading(0, 0, -1500000000, 200000000)],
        WARN,
        "n3: 1.5 s behind the first node, to within 0.1",
    ),
    (
        [ClockReading(0, 0, 0, 0), ClockReading(0, 0, 0, 2000000), ClockReading(0, 0, -1500000000, 1200000000)],
        OK,
        "1500.000 ms",
    ),  # it may be less than a second
)
def test_clock_offset_over_a_second_gives_warning(offsets, status, words):
    check = job_checks.check_clocks(table(nodes=len(offsets)), offsets)
    assert check.status == status and words in check.found and bool(check.cure) is (status != OK)


def run_volume(kind, **more):
    return {"volumes": (dataclasses.replace(VOLUMES[0], kind=kind, **more), *VOLUMES[1:])}


def test_shared_run_directory_passes():
    check = job_checks.check_directory(table(nodes=2), "/scratch/run", "")
    assert (check.status, check.found) == (OK, "/scratch/run (lustre), seen by 2 nodes")


def test_run_directory_on_local_file_system_gives_warning():
    one, two = (table(nodes=count, machines=machines(run_volume("ext4"), run_volume("ext4"))) for count in (1, 2))
    assert job_checks.check_directory(one, "/run", "").status == OK
    check = job_checks.check_directory(two, "/run", "")
    assert check.status == WARN and "ext4" in check.found and check.cure


def test_run_directory_unseen_by_a_node_fails():
    rows = list(
        table(nodes=3, ranks=1, machines=machines(run_volume("nfs"), run_volume("nfs"), run_volume("tmpfs"))).rows
    )
    rows[2] = dataclasses.replace(rows[2], unseen="another directory")
    check = job_checks.check_directory(RankTable(rows), "/run", "")
    assert (check.status, check.found) == (FAIL, "/run: n3: another directory (tmpfs)") and check.cure


def test_unwritable_run_directory_fails():
    check = job_checks.check_directory(table(), "/run", "Permission denied")
    assert (check.status, check.found) == (FAIL, "/run: Permission denied") and check.cure


def test_free_space_is_reported_per_volume():
    check = job_checks.check_space(table(nodes=2, machines=machines({}, run_volume("lustre", free_bytes=90 * GIB))))
    assert check.status == OK and "run directory 90.0 GiB (/scratch/run, lustre)" in check.found


@cases(
    "change, words",
    ({"free_bytes": GIB - 1}, "n2: run directory /scratch/run (lustre) has less than 1.0 GiB free"),
    ({"has_inodes": False}, "inodes"),
    ({"error": "Stale file handle"}, "n2: run directory /scratch/run: Stale file handle"),
)
def test_unusable_volume_gives_warning(change, words):
    check = job_checks.check_space(table(nodes=2, machines=machines({}, run_volume("lustre", **change))))
    assert check.status == WARN and words in check.found and check.cure


@cases(
    "software, status, words",
    ({"hpcdist": "1", "numpy": "2", "MPI": "3"}, OK, "hpcdist 1, numpy 2, MPI 3"),
    ({"hpcdist": "1", "MPI": "3"}, WARN, "numpy missing"),
    ({"hpcdist": "1", "numpy": "1", "MPI": "3"}, WARN, "n1: numpy 2; n2: numpy 1"),
    ({"hpcdist": "0", "numpy": "2", "MPI": "3"}, FAIL, "n2: hpcdist 0"),
    ({"hpcdist": "1", "numpy": "2", "MPI": "4"}, FAIL, "n2: MPI 4"),
)
def test_different_software_versions_are_reported(software, status, words):
    check = job_checks.check_software(table(nodes=2, machines=machines({}, {"software": software})))
    assert check.status == status and words in check.found and bool(check.cure) is (status != OK)


def test_different_processors_give_warning():
    assert job_checks.check_processors(table(nodes=2)).status == OK
    check = job_checks.check_processors(table(nodes=2, machines=machines({}, {"processor": "An old CPU"})))
    assert check.status == WARN and "n2: An old CPU, 8 cores" in check.found


def test_different_settings_give_warning():
    same = table(nodes=2, machines=machines(*[{"settings": {"HPCDIST_CUDA_AWARE": "no", "PYTHONPATH": "x"}}] * 2))
    assert job_checks.check_settings(same).found == "HPCDIST_CUDA_AWARE=no"
    other = table(nodes=2, machines=machines({"settings": {"OMP_NUM_THREADS": "4"}}, {}))
    check = job_checks.check_settings(other)
    assert check.status == WARN
    assert check.found == "n1: OMP_NUM_THREADS=4; n2: OMP_NUM_THREADS=(unset)"


def test_nodes_with_equal_names_are_numbered():
    assert table(nodes=3, host="vm").labels == ["node0", "node1", "node2"]


# -- facts


def test_rank_facts_are_read_from_srun_variables():
    output = LaunchEnvironment("MPICH mpirun", 4, 1, None)
    result = facts.rank_facts(output, FACTS.gpu, SRUN | {"SLURM_CPUS_PER_TASK": "6", "OMP_NUM_THREADS": "3"})
    assert (result.slurm_local, result.cores_asked, result.threads, result.announced) == (1, 6, "3", None)


def test_local_rank_of_mpirun_daemon_is_ignored():
    """Open MPI starts one daemon per node with srun. Every rank inherits the daemon's SLURM_LOCALID=0."""
    of_daemon = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    assert facts.rank_facts(LaunchEnvironment("Open MPI mpirun", 4, 1, 1), FACTS.gpu, of_daemon).slurm_local is None


def test_node_facts_omit_settings_of_a_single_launch():
    environment = {"HPCDIST_CUDA_AWARE": "no", "HPCDIST_FAILURE_DIR": "/tmp/x", "HOME": "/root", "NCCL_DEBUG": "INFO"}
    machine = facts.node_facts("Some MPI", VOLUMES, environment | {"LD_LIBRARY_PATH": "/b:/a:/b:"})
    expected = {"HPCDIST_CUDA_AWARE": "no", "NCCL_DEBUG": "INFO", "LD_LIBRARY_PATH": "/b:/a"}
    assert machine.settings == expected, "launchers add their folder to a path again on each hop"
    assert machine.software["MPI"] == "Some MPI" and machine.processor and machine.cores > 0


def test_numa_domains_are_read_from_sysfs(tmp_path):
    for node, cpus in enumerate(("0-1,4\n", "2-3\n", "\n")):  # the last has memory only
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus)
    assert facts.numa_domains(tmp_path) == ((0, 1, 4), (2, 3))
    (tmp_path / "node0" / "cpulist").write_text("damaged")
    assert facts.numa_domains(tmp_path) == ()


def test_source_digest_changes_after_edit(tmp_path):
    (tmp_path / "module.py").write_text("A = 1\n")
    before = facts.source_digest(tmp_path)
    (tmp_path / "module.py").write_text("A = 2\n")
    assert len({before, facts.source_digest(tmp_path), facts.source_digest()}) == 3


def test_volume_facts_of_missing_path_use_an_existing_parent(tmp_path):
    assert facts.volume_facts("x", tmp_path / "not" / "there", "ext4").free_bytes > 0
    (tmp_path / "file").touch()
    assert facts.volume_facts("x", tmp_path / "file" / "below", "ext4").error == ""


def test_stale_volume_is_reported_without_raising(monkeypatch, tmp_path):
    def stale(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    assert job._volume("x", tmp_path).kind != "unknown"
    monkeypatch.setattr(stripe, "file_system", stale)
    monkeypatch.setattr(facts.os, "statvfs", stale)
    assert job._volume("x", tmp_path) == Volume("x", str(tmp_path), "unknown", 0, error="Stale file handle")


def test_node_local_volume_is_tmpdir(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert [volume.path for volume in job._volumes(Path("/run"))] == ["/run", str(tmp_path), "/dev/shm"]
    monkeypatch.delenv("TMPDIR")
    assert job._volumes(Path("/run"))[1].path == "/tmp"


def test_gpu_facts_use_the_announced_local_rank(monkeypatch):
    monkeypatch.setattr(facts.device, "choose", lambda local_rank: chosen.append(local_rank))
    monkeypatch.setattr(facts.device, "count", lambda: 4)
    monkeypatch.setattr(facts.device, "bus_id", lambda: "0000:01:00.0")
    chosen = []
    output = LaunchEnvironment("mpirun", 4, 3, 3)
    assert facts.gpu_facts(output, "", {"CUDA_VISIBLE_DEVICES": "2"}) == GpuFacts("2", 4, "0000:01:00.0")
    assert facts.gpu_facts(output, "", {"CUDA_VISIBLE_DEVICES": "MIG-1"}).name == "0000:01:00.0 MIG-1"
    assert chosen == [3, 3]
    assert facts.gpu_facts(output, "cpu", {}).count == 0 and chosen == [3, 3]
    assert "no local rank" in facts.gpu_facts(LaunchEnvironment("mpirun", 4, 3, None), "gpu", {}).reason


def test_driver_error_is_reported_as_reason(monkeypatch):
    def broken():
        raise OSError("device is busy")

    monkeypatch.setattr(facts.device, "count", broken)
    assert facts.gpu_facts(None, "", {}).reason == "OSError: device is busy"


def test_srun_plugins_are_listed(tmp_path):
    (tmp_path / "srun").write_text("#!/bin/sh\necho 'MPI plugin types are...' >&2\nprintf '\\tpmi2\\n\\tnone\\n' >&2\n")
    (tmp_path / "srun").chmod(0o755)
    assert facts.plugin_versions({"PATH": str(tmp_path)}) == "pmi2, none"
    assert facts.plugin_versions({"PATH": "/no/such/path"}) == ""


# -- messages


def gather_on_threads(
    size, ranks_per_node, directory, clock=lambda rank: time.time, sees=lambda rank: True, look_s=10.0
):
    """Run gather on ``size`` threads. A rank for which ``sees`` is false looks into another directory."""

    def body(comm):
        stages = []
        local_data = directory if sees(comm.rank) else directory / "elsewhere"
        result = gather.gather(
            comm, FACTS, lambda: MACHINE, local_data, stages.append, clock=clock(comm.rank), look_s=look_s
        )
        return result, stages

    return run_threads(size, body, ranks_per_node)


@pytest.mark.parametrize(("size", "ranks_per_node", "nodes"), [(1, 1, 1), (2, 2, 1), (3, 2, 2), (4, 2, 2), (4, 1, 4)])
def test_rank_0_gathers_all_rows(tmp_path, size, ranks_per_node, nodes):
    result = gather_on_threads(size, ranks_per_node, tmp_path / "run")
    one = result[0][0]
    assert [each for each, _ in result[1:]] == [None] * (size - 1)
    assert [row.node for row in one.table.rows] == [rank // ranks_per_node for rank in range(size)]
    assert [row.local_rank for row in one.table.rows] == [rank % ranks_per_node for rank in range(size)]
    assert one.table.machines == [MACHINE] * nodes and one.failure == ""
    assert {stages[-1] for _, stages in result} == {"collecting what all ranks found"}
    assert job_checks.check_messages(one.table).status == OK
    assert job_checks.check_directory(one.table, "run", one.failure).status == OK
    assert len(one.offsets) == nodes
    assert all(abs(offset.offset_ns) <= offset.bound_ns + 1e6 for offset in one.offsets)
    assert any(row.greeting.inside_s is not None for row in one.table.rows) is (ranks_per_node > 1 and size > 1)
    assert list((tmp_path / "run").iterdir()) == [], "rank 0 removes its file"


def test_rows_of_alternating_nodes_are_in_rank_order(tmp_path):
    """`mpirun --map-by node` places ranks this way."""

    def body(comm):
        comm.declared_node = comm.rank % 2
        facts = dataclasses.replace(FACTS, announced=comm.rank)
        return gather.gather(comm, facts, lambda: MACHINE, tmp_path, lambda _: None)

    one = run_threads(5, body)[0]
    assert [(row.node, row.local_rank, row.facts.announced) for row in one.table.rows] == [
        (0, 0, 0), (1, 0, 1), (0, 1, 2), (1, 1, 3), (0, 2, 4)
    ]  # fmt: skip


def test_clock_ahead_of_first_node_gives_warning(tmp_path):
    result = gather_on_threads(4, 2, tmp_path, clock=lambda rank: lambda: time.time() + 5.0 * (rank >= 2))
    offsets = result[0][0].offsets
    assert (offsets[0].offset_ns, offsets[0].bound_ns) == (0, 0)
    assert offsets[1].offset_ns == pytest.approx(5e9, abs=offsets[1].bound_ns + 1e3)
    check = job_checks.check_clocks(result[0][0].table, offsets)
    assert check.status == WARN and check.found.startswith("node1: 5.0 s ahead")


def test_node_with_another_directory_fails(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    result, _ = gather_on_threads(4, 2, tmp_path, sees=lambda rank: rank < 2, look_s=0.2)[0]
    check = job_checks.check_directory(result.table, "run", result.failure)
    assert check.status == FAIL and "node1: another directory" in check.found


def test_directory_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").touch()
    assert gather_on_threads(2, 1, tmp_path / "file" / "run")[0][0].failure == "Not a directory"


def test_file_that_appears_late_is_found(tmp_path):
    """An NFS client sees a new file only after its attribute cache expires."""
    path = tmp_path / "late"
    assert "another directory" in gather.look_for_text(path, "text", 0.0)
    looks = []
    original = Path.read_text

    class Late(type(path)):
        def read_text(self, *arguments, **options):
            looks.append(1)
            if len(looks) == 3:
                path.write_text("text")
            return original(path, *arguments, **options)

    assert gather.look_for_text(Late(path), "text", 10.0) == "" and len(looks) == 3
    assert "another content" in gather.look_for_text(path, "other", 0.0)
    assert "no such directory" in gather.look_for_text(tmp_path / "no" / "file", "text", 0.0)


@pytest.mark.parametrize("damaged", [2, 1 << 17])
def test_damaged_message_data_is_detected(damaged):
    """The damage is in a small message or in the large message."""

    def body(comm):
        exchange = comm.sendrecv

        def damaging(send, to, receive, source, tag):
            exchange(send, to, receive, source, tag)
            if receive.size == damaged and comm.rank == 1:
                receive[-1] += 1

        comm.sendrecv = damaging
        return gather._ring(comm)[0]

    assert run_threads(3, body) == [True, False, True]


def test_failing_rank_releases_the_other_ranks(tmp_path):
    def body(comm):
        def describe():
            raise OSError("a bug in here")

        gather.gather(
            comm, FACTS, describe if comm.rank == 1 else lambda: MACHINE, tmp_path, lambda _: None, look_s=0.2
        )

    with pytest.raises((OSError, CommunicationError)):
        run_threads(3, body, 1)
    assert list(tmp_path.iterdir()) == []


def test_expired_stage_deadline_names_the_stage():
    failures = []
    deadline = gather.StageDeadline("rank 3 on n2", 0.05, failures.append)
    deadline.stage("messages with ranks 1 and 5")
    deadline._timer.join(60)
    assert isinstance(failures[0], DeadlineError)
    assert str(failures[0]).startswith("rank 3 on n2: messages with ranks 1 and 5 did not end within 0.05 s")


def test_finished_stage_does_not_expire():
    failures, timers = [], []
    deadline = gather.StageDeadline("rank 3 on n2", 3600.0, failures.append)
    for _ in range(2):
        deadline.stage("a stage")
        timers.append(deadline._timer)
    deadline.stop()
    for timer in timers:
        timer.join(60)
    assert failures == [] and not any(timer.is_alive() for timer in timers)


# -- the command


@cases(
    "environment, scheduler, status, words",
    ({}, "", OK, "no scheduler"),
    ({}, "Slurm", WARN, "Slurm does not report"),
    ({}, "PBS", WARN, "PBS does not report"),
    ({"SLURM_JOB_ID": "7"}, "Slurm", OK, "0:59:01 left, until 1970-01-01 01:15:41 UTC, known from squeue only"),
    ({"SLURM_JOB_ID": "8"}, "Slurm", WARN, "Slurm does not report"),
    ({"SLURM_JOB_END_TIME": "8061"}, "Slurm", OK, "1:57:41 left, until 1970-01-01 02:14:21 UTC"),
    ({"SLURM_JOB_END_TIME": str(10**10)}, "Slurm", OK, "no limit"),
    ({"SLURM_JOB_END_TIME": "soon"}, "Slurm", FAIL, "soon"),
)
def test_remaining_walltime_is_reported(monkeypatch, environment, scheduler, status, words):
    def queued(jobs):
        if jobs != ["7"]:
            raise MissingCapabilityError("squeue does not answer")
        return [JobState(id="7", state="RUNNING", time_left_s=3541.0)]

    monkeypatch.setattr(slurm, "queued", queued)
    check = job._walltime(scheduler, environment, now=1000.0)
    assert check.status == status and words in check.found and bool(check.cure) is (status != OK)


def test_cure_for_separate_worlds_lists_srun_plugins(monkeypatch):
    monkeypatch.setattr(facts, "plugin_versions", lambda: "pmi2, none")
    error = ConfigurationError("a world of 1")
    of_srun = job._world_failure(LaunchEnvironment("Slurm srun", 4, 0, 0), error)
    assert of_srun.status == FAIL and "(available here: pmi2, none)" in of_srun.cure
    by_pmi2 = LaunchEnvironment("MPICH mpirun", 4, 2, 0)
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}
    assert "--mpi=pmix for Open MPI" in job._world_failure(by_pmi2, error, step).cure
    assert "srun" not in job._world_failure(by_pmi2, error, {}).cure
    assert "srun" not in job._world_failure(LaunchEnvironment("Open MPI mpirun", 4, 0, 0), error).cure


def test_job_report_of_a_single_process_passes(tmp_path):
    line = [sys.executable, "-P", "-m", "hpcdist", "doctor", "--job", "--json", "--device", "cpu", "--out", "run"]
    done = run(line, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["ok"], report["ranks"], len(report["nodes"])) == (True, 1, 1)
    names = {check["name"] for check in report["checks"]}
    assert {"world", "walltime", "scheduler", "messages", "GPUs", "cores", "clocks", "run directory"} <= names
    assert list((tmp_path / "run").iterdir()) == []


@cases(
    "arguments, words",
    (["--out", "run"], "--out is only for a batch job: add --job"),
    (["--device", "gpu"], "--device is only for a batch job"),
    (["--job", "--launch"], "omit --launch"),
)
def test_conflicting_options_are_rejected(arguments, words):
    error = CliRunner().invoke(command.command, arguments).exception
    assert isinstance(error, UsageError) and words in str(error)
