"""PyTorch's own tests of torch.distributed, run on the ranks of a launcher with one backend.

    mpirun -n 2 python tests/harness/pytorch_suite.py hpcdist|gloo OUT.json [NAME...]

`DistributedTest` of torch.testing._internal starts its processes by itself; here its methods run on the ranks that are
there. Rank 0 writes {name: [outcome of each rank, with its reason]} after each test, so that a run that a test ended
can go on behind it: tests that OUT.json has are not run again.
"""

import faulthandler
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

LIMIT_S = 90.0
warnings.simplefilter("ignore")
backend, out, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
world = hpcdist.init()
folder = world.bcast(tempfile.mkdtemp() if world.rank == 0 else "")
Path(folder, "barrier").mkdir(exist_ok=True)
Path(folder, "test_dir").mkdir(exist_ok=True)
# Where tests ask what a backend can do, they ask for gloo: ours has to pass what that does.
os.environ |= {"BACKEND": "gloo", "TEMP_DIR": folder, "PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu"}

import torch.distributed as dist
from torch.testing._internal import common_utils
from torch.testing._internal.common_distributed import TEST_SKIPS
from torch.testing._internal.distributed import distributed_test

REASONS = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}


class Suite(common_utils.TestCase, distributed_test.DistributedTest._DistTestBase):
    """The tests, with what their base classes have beside them."""

    rank, world_size = world.rank, world.size
    init_method = "env://"
    file_name = os.path.join(folder, "store")

    def _barrier(self, *_, **__):
        world.barrier()


def outcome(name):
    """Return how the test ended on this rank."""
    case = Suite(name)
    try:
        case.setUp()
        getattr(case, name)()
        case.doCleanups()
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except SystemExit as leaving:
        return f"skipped: {REASONS.get(leaving.code, leaving.code)}"
    except BaseException:  # noqa: BLE001
        return "failed: " + traceback.format_exc()[-1500:]
    return "passed"


done = world.bcast(json.loads(out.read_text()) if world.rank == 0 and out.exists() else {})
for name in names or sorted(method for method in dir(Suite) if method.startswith("test_")):
    if name in done:
        continue
    if world.rank == 0:
        done[name] = ["ended the job"] * world.size
        out.write_text(json.dumps(done, indent=1))
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    world.barrier()
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    verdicts = world.allgather(outcome(name))
    if dist.is_initialized():
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    if world.rank == 0:
        done[name] = verdicts
        out.write_text(json.dumps(done, indent=1))
        print(name, *sorted({verdict.partition(":")[0] for verdict in verdicts}), flush=True)
