"""PyTorch's own tests of torch.distributed, run on the ranks of a launcher with one backend.


mpirun -n 2 python tests/harness/pytorch/suite.py hpcdist|gloo distributed|fsdp|tensor|pipelining OUT.json [NAME...]

"distributed" is `DistributedTest` of torch.testing._internal. The other suites are in `sharding` and `tensors`, on
PyTorch's base classes. Such classes normally start their processes; here their methods run on the existing ranks.

Rank 0 writes {name: [outcome of each rank, with its reason]} after each test. A run that a test ended can therefore
continue: tests that are in OUT.json are not run again.
"""

import contextlib
import faulthandler
import itertools
import json
import os
import sys
import tempfile
import traceback
import unittest
import warnings
from datetime import timedelta
from pathlib import Path

import hpcdist.torch

faulthandler.enable()
LIMIT_S = 300.0  # a machine may be busy
warnings.simplefilter("ignore")
backend, suite, out, names = sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:]
world = hpcdist.init()
folder = world.bcast(tempfile.mkdtemp() if world.rank == 0 else "")
Path(folder, "barrier").mkdir(exist_ok=True)
Path(folder, "test_dir").mkdir(exist_ok=True)
# Where tests ask what a backend can do, they ask for gloo: ours has to pass what that does.
os.environ |= {"BACKEND": "gloo", "TEMP_DIR": folder, "PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu"}

import torch.distributed as dist
from torch.testing._internal import common_utils
from torch.testing._internal.common_distributed import TEST_SKIPS

start_group = dist.init_process_group


def start_group_of_this_backend(*arguments, **options):
    """Start the default group of a test, which asks for gloo, with the backend of the suite."""
    return start_group(*arguments, **(options | {"backend": backend}))


dist.init_process_group = start_group_of_this_backend


REASONS = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}


class OnTheseRanks(common_utils.TestCase):
    """A test on existing processes, in a group of the backend."""

    rank, world_size = world.rank, world.size
    init_method = "env://"
    file_name = os.path.join(folder, "store")

    def setUp(self):
        common_utils.TestCase.setUp(self)
        self.rank = world.rank

    def tearDown(self):
        common_utils.TestCase.tearDown(self)

    def _barrier(self, *_, **__):
        world.barrier()

    def join_or_run(self, function):  # of MultiProcessTestCase
        return function


def classes():
    """Return the test classes of the suite."""
    if suite == "distributed":
        from torch.testing._internal.distributed.distributed_test import DistributedTest

        bases = [DistributedTest._DistTestBase]
    else:
        from harness.pytorch import sharding, tensors

        bases = (sharding.SUITES | tensors.SUITES)[suite]
    return [type(base.__name__, (OnTheseRanks, base), {}) for base in bases]


def outcome(case):
    """Return the outcome of the test on this rank."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            case.setUp()
            getattr(case, case._testMethodName)()
            case.doCleanups()
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except SystemExit as leaving:
        return f"skipped: {REASONS.get(leaving.code, leaving.code)}"
    except BaseException:  # noqa: BLE001
        return "failed: " + traceback.format_exc()[-1500:]
    return "passed"


def tests():
    """Yield the name of each test and its case."""
    for kind in classes():
        prefix = "" if suite == "distributed" else f"{kind.__name__}."
        for method in sorted(method for method in dir(kind) if method.startswith("test_")):
            if not names or prefix + method in names:
                yield prefix + method, kind(method)


sys.path.insert(0, str(Path(__file__).parents[2]))
# With gloo, ranks of a test could otherwise meet ranks of the previous test in the store of the same address.
stores = (f"file://{folder}/store-{number}" for number in itertools.count())
done = world.bcast(json.loads(out.read_text()) if world.rank == 0 and out.exists() else {})
for name, case in tests():
    if name in done:
        continue
    if world.rank == 0:
        done[name] = ["ended the job"] * world.size
        out.write_text(json.dumps(done, indent=1))
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    world.barrier()
    where = {"init_method": next(stores), "rank": world.rank, "world_size": world.size} if backend == "gloo" else {}
    start_group(backend, timeout=timedelta(seconds=60), **where)
    verdicts = world.allgather(outcome(case))
    if dist.is_initialized():
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    if world.rank == 0:
        done[name] = verdicts
        out.write_text(json.dumps(done, indent=1))
        print(name, *sorted({verdict.partition(":")[0] for verdict in verdicts}), flush=True)
