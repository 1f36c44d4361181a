"""Programs of PyTorch that a launcher starts: one changed line, failures, and PyTorch's own tests."""

import json
import re
import sys
import textwrap
from pathlib import Path

import pytest

from harness import jobs, pages
from hpcdist.cli.help import DOCS

torch = pytest.importorskip("torch")
SUITE = Path(__file__).parents[1] / "harness" / "pytorch" / "suite.py"


@pytest.fixture
def program(launch):
    """``program(ranks, text, **environment)``: run a script that imports hpcdist.torch."""

    def run(ranks, text, **environment):
        begin = "import os, time, torch, hpcdist.torch\nimport torch.distributed as dist\n"
        return launch(ranks, begin + textwrap.dedent(text), **environment)

    return run


def test_process_group_has_the_ranks_of_mpi(program):
    done = program(
        2,
        """
        dist.init_process_group("hpcdist")
        assert (dist.get_rank(), dist.get_world_size()) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        beside = dist.new_group(backend="gloo")
        total = torch.ones(1)
        dist.all_reduce(total, group=beside)
        dist.all_reduce(total)
        print("total", int(total))
        port = os.environ["MASTER_PORT"]
        dist.destroy_process_group()
        dist.init_process_group("hpcdist")
        dist.all_reduce(total, group=dist.new_group(backend="gloo"))  # over a store of its own
        print("again", int(total), port != os.environ["MASTER_PORT"])
        dist.destroy_process_group()
        """,
        HPCDIST_ENERGY="1",
        HPCDIST_SET__ENERGY__SOURCES="declared",
        HPCDIST_SET__ENERGY__CPU_TDP_W="100",
    )
    assert done.code == 0, done.stderr
    assert done.stdout.count("total 4") == done.stdout.count("again 8 True") == 2
    assert len(re.findall(r"^energy \(declared model, .*\) .* m?J", done.stdout, re.MULTILINE)) == 2, done.stdout


def test_world_size_that_contradicts_mpi_is_rejected(program):
    done = program(2, "", RANK="0", WORLD_SIZE="4")
    assert done.code != 0
    assert re.search(
        "the environment has RANK=0, WORLD_SIZE=4, but MPI .* started this process as rank . of 2", done.stderr
    )


def test_exception_ends_all_ranks_and_is_shown(program):
    done = program(
        2,
        """
        dist.init_process_group("hpcdist")
        if dist.get_rank() == 1:
            raise ValueError("the batch is bad")
        dist.all_reduce(torch.ones(3))
        """,
    )
    assert done.code != 0
    assert "ValueError: the batch is bad" in done.stderr


def test_exception_during_ddp_training_crashes_no_other_rank(program):
    """The C++ reducer of DDP waits for gradients of the rank that has failed."""
    done = program(
        2,
        """
        dist.init_process_group("hpcdist")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 3))
        for step in range(5):
            if dist.get_rank() == 1 and step == 3:
                time.sleep(0.3)
                raise ValueError("the batch is bad")
            model(torch.ones(4, 5)).sum().backward()
        """,
    )
    assert done.code == 1, done.output
    assert "[rank 1] ValueError: the batch is bad" in done.stderr
    assert "Segmentation fault" not in done.stderr


def test_exception_on_all_ranks_waits_for_operations_in_flight(program):
    """MPI_Finalize must not overtake an operation of the queue's thread."""
    done = program(
        2,
        """
        dist.init_process_group("hpcdist")
        works = [dist.all_reduce(torch.ones(1 << 20), async_op=True) for _ in range(20)]
        raise ValueError("the batch is bad")
        """,
    )
    assert done.code == 1, done.output
    assert done.stderr.count("ValueError: the batch is bad") == 1
    assert "MPI_FINALIZE" not in done.stderr and "Segmentation fault" not in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.matrix_except("spawn")
def test_worker_processes_do_not_start_mpi_and_name_the_reason(launch, method):
    """Spawn and forkserver processes import the script, and forked processes inherit MPI."""
    done = launch(
        2,
        """
import multiprocessing, sys
import numpy as np
import hpcdist

def attempt(call):
    try:
        hpcdist.init() if call == "init" else hpcdist.allreduce(np.ones(1))
    except hpcdist.errors.UsageError as error:
        return "is a worker that a rank started" in str(error)

if __name__ == "__main__":
    hpcdist.init()
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        reasons = pool.map_async(attempt, ["init", "allreduce"]).get(timeout=100)
    print(*reasons, int(hpcdist.allreduce(np.ones(1))[0]), flush=True)
""",
        method,
    )
    assert done.code == 0, done.output
    assert re.findall("True True 2", done.stdout) == ["True True 2"] * 2, done.output


@pytest.mark.matrix
def test_worker_imports_the_backend_but_cannot_form_a_group(program):
    done = program(
        2,
        """
        import multiprocessing

        def attempt():
            try:
                dist.init_process_group("hpcdist")
            except hpcdist.errors.UsageError as error:
                assert "is a worker that a rank started" in str(error)
                os._exit(7)

        if __name__ == "__main__":
            worker = multiprocessing.get_context("spawn").Process(target=attempt)
            worker.start()
            worker.join(100)
            print("worker", worker.exitcode, flush=True)
        """,
    )
    assert done.code == 0, done.output
    assert done.stdout.count("worker 7") == 2, done.output


@pytest.mark.full
def test_signal_to_loader_workers_still_lets_the_rank_save(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("""
import os, subprocess, hpcdist, hpcdist.torch
from multiprocessing import active_children
from torch.utils.data import DataLoader

for step, _ in enumerate(DataLoader(range(10**6), num_workers=2)):
    code = hpcdist.torch.should_stop()
    if step == 2:  # not from this process: workers end at a signal of their rank
        pids = [str(worker.pid) for worker in active_children()]
        assert len(pids) == 2
        subprocess.run(["sh", "-c", f"kill -TERM {' '.join(pids)} {os.getpid()}"], check=True)
    if code:
        break
print("saved", flush=True)
hpcdist.init().exit(code)
""")
    done = jobs.run([sys.executable, str(program)], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (75, "saved\n"), done.stderr


@pytest.mark.full
def test_skipped_operation_is_named(program, tmp_path):
    """The report names the missing rank, and the script line where the others wait."""
    done = program(
        2,
        """
        dist.init_process_group("hpcdist")
        dist.barrier()
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(3))  # rank 1 does not
        time.sleep(60)
        """,
        HPCDIST_DEADLINE_S="3",
        HPCDIST_RUN_DIR=str(tmp_path / "run"),
    )
    assert done.code != 0
    assert "waited past its deadline" in done.stderr
    hang = jobs.hpcdist("hang", tmp_path / "run").stdout
    assert re.search(r"all_reduce #\d+ on world/torch0, 3 x float32, at \S+program\.py:\d+", hang), hang


@pytest.mark.full
def test_missing_member_of_a_new_group_is_named(program, tmp_path):
    """Rank 1 waits for rank 0, which waits in another group for rank 2."""
    done = program(
        3,
        """
        dist.init_process_group("hpcdist")
        first, second = dist.new_group([0, 1]), dist.new_group([0, 2])
        if dist.get_rank() == 2:
            time.sleep(60)
        dist.all_reduce(torch.ones(3), group=second if dist.get_rank() == 0 else first)
        """,
        HPCDIST_DEADLINE_S="3",
        HPCDIST_RUN_DIR=str(tmp_path / "run"),
    )
    assert done.code != 0
    hang = jobs.hpcdist("hang", tmp_path / "run").stdout
    place = r"at: all_reduce #3 on world/torch2, 3 x float32, at \S+program\.py:8 .*\n    world/torch2 has ranks 0, 2\n"
    assert re.match(rf"ABSENT: rank 2 did not reach .*\n    {place}", hang), hang


@pytest.mark.full
def test_end_of_a_group_is_named_if_a_rank_skipped_an_operation(program, tmp_path):
    done = program(
        2,
        """
        dist.init_process_group("hpcdist")
        if dist.get_rank() == 0:
            dist.barrier()  # rank 1 does not
        dist.destroy_process_group()
        """,
        HPCDIST_DEADLINE_S="2",
        HPCDIST_RUN_DIR=str(tmp_path / "run"),
    )
    assert done.code != 0
    hang = jobs.hpcdist("hang", tmp_path / "run").stdout
    result = (
        r"SKIPPED: rank 1 made destroy_process_group #2 on world/torch0, at \S+program\.py:7 .* rank 0 made barrier"
    )
    assert re.search(result, hang), hang


def test_differing_calls_are_named_with_their_lines(program):
    done = program(
        2,
        """
        dist.init_process_group("hpcdist")
        dist.all_reduce(torch.ones(3 + dist.get_rank()))
        """,
        HPCDIST_CHECK_COLLECTIVES="1",
    )
    assert done.code == 1, done.output
    assert re.search(r"rank 1: \S+ allreduce \(sum\) of 4 float32, at \S+program\.py:5\.", done.stderr), done.stderr


@pytest.mark.full
def test_python_development_mode_shows_no_warnings(program):
    """The backend leaves no file, socket or thread open and calls no deprecated function."""
    done = program(
        2,
        """
        dist.init_process_group("hpcdist")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 3))
        for _ in range(3):
            model(torch.ones(4, 5)).sum().backward()
        group = dist.new_group()
        work = dist.all_reduce(torch.ones(10), group=group, async_op=True)
        peer = 1 - dist.get_rank()
        ways = dist.isend, dist.irecv
        dist.batch_isend_irecv([dist.P2POp(way, torch.ones(1), peer) for way in ways])
        work.wait()
        dist.destroy_process_group(group)
        dist.destroy_process_group()
        """,
        PYTHONDEVMODE="1",
    )
    assert done.code == 0, done.stderr
    assert not re.findall(r"hpcdist\S*: \w*Warning.*|sys:\d+: ResourceWarning.*", done.stderr), done.stderr


# DeepSpeed compiles messages of its own for inference, which no training sends: 40 s of a C++ compiler.
UNCOMPILED = """
import deepspeed.ops
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
"""


@pytest.mark.full
@pytest.mark.matrix_except("3")
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_matches_one_process(launch, stage):
    """The script of the documentation page is compared with plain PyTorch on the whole batch."""
    pytest.importorskip("deepspeed")
    (script,) = (block.text for block in pages.blocks((DOCS / "torch.md").read_text()) if block.title == "zero.py")
    assert '"stage": 3' in script
    jobs.python("import deepspeed, torch._dynamo")  # once for both ranks: a new environment has no bytecode of them
    done = launch(2, UNCOMPILED + script.replace('"stage": 3', f'"stage": {stage}'), DS_ACCELERATOR="cpu")
    assert done.code == 0, done.stderr
    torch.manual_seed(0)
    inputs = torch.randn(256, 32)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), inputs)
        loss.backward()
        optimizer.step()
    assert f"loss {loss.item():.4f}" in done.stdout


# Of each kind of operation one of PyTorch's own tests; all of them: see the docstring of the program.
CHOSEN = [
    "test_all_gather",
    "test_all_gather_coalesced_simple",
    "test_all_reduce_product",
    "test_all_to_all_single_unequal_split",
    "test_barrier",
    "test_batch_isend_irecv_gloo",
    "test_gather",
    "test_gather_object",
    "test_isend",
    "test_reduce_min",
    "test_scatter",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_static_graph_api_cpu",
]


SUITES = {
    "distributed": CHOSEN,
    "fsdp": [
        "Fsdp.test_parity_strategy_FULL_SHARD_model_NestedWrappedModule",
        "FullyShard.test_parity_with_tensor_parallelism_checkpoints_True",
        "States.test_checkpoints_is_async_True_kind_fully_shard",
    ],
    "tensor": [
        "Tensors.test_redistribute_shape1_source_shard0_target_shard1",
        "Tensors.test_transformer_sequence_True_shares_True",
    ],
    "pipelining": ["Pipelines.test_schedule_schedule_ScheduleZBVZeroBubble"],
}


@pytest.mark.full
@pytest.mark.matrix_except("distributed", "fsdp")
@pytest.mark.parametrize("suite", SUITES)
def test_pytorch_suite_passes(mpiexec, tmp_path, suite):
    pytest.importorskip("expecttest", reason="expecttest, which PyTorch's tests need, is not installed")
    out = tmp_path / "outcomes.json"
    done = mpiexec(2, [str(SUITE), "hpcdist", suite, str(out), *SUITES[suite]])
    assert done.returncode == 0, done.stdout[-5000:]
    outcomes = json.loads(out.read_text())
    assert outcomes == {name: ["passed", "passed"] for name in SUITES[suite]}, outcomes
