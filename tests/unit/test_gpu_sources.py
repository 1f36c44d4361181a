"""The kernels as NVIDIA's compiler reads them: for each generation of GPUs, without a spill that would be felt."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.fused import Source
from hpcdist.models import attention_device, device
from hpcdist.optim import device as updates

UPDATES = {"GRADIENT": dtype_of("bfloat16"), "WORKING": dtype_of("bfloat16")}
SOURCES = {
    "activation": (device.ACTIVATION, {}),
    "norm": (device.NORM, {}),
    "cross entropy": (device.CROSS_ENTROPY, {}),
    "embedding": (device.EMBEDDING, {}),
    "updates": (updates.UPDATES, UPDATES),
    "attention": (attention_device.TENSOR, {"HEAD": 64}),
}
SPILLED_BYTES = 64  # a thread, at most


@pytest.mark.parametrize("name", SOURCES)
def test_the_compiler_takes_every_source(name: str, tmp_path: Path) -> None:
    """Needs nvcc, not a GPU."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("no nvcc on this machine")
    source, types = SOURCES[name]
    real = "float32" if name == "updates" else "bfloat16"
    text = tmp_path / "kernels.cu"
    text.write_text(source.code(REAL=dtype_of(real), **types))
    command = [compiler, "-std=c++17", "-arch=sm_80", "-cubin", "-Xptxas=-v", "-Werror=all-warnings", str(text)]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "kernels.cubin")], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", done.stderr)]
    assert len(spilled) == len(re.findall(r'extern "C" __global__', source.path.read_text()))
    assert max(spilled) <= SPILLED_BYTES


def test_a_source_says_what_it_has_no_kernels_for() -> None:
    with pytest.raises(Exception, match=r"attention.cu has no kernels for float32, only for float16, bfloat16"):
        attention_device.TENSOR.code(REAL=dtype_of("float32"), HEAD=16)
    assert isinstance(device.NORM, Source) and device.NORM.takes(dtype_of("float64"))
