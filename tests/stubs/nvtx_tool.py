"""A profiler that replaces Nsight Systems: a C compiler builds it from nvtx_tool.c, and NVTX loads it."""

import shutil
import subprocess
from pathlib import Path

import pytest


def environment(folder: Path) -> dict[str, str]:
    """Return the variables that make processes write their ranges into files of ``folder``."""
    pytest.importorskip("nvtx")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler to build the tool with")
    source, library = Path(__file__).with_name("nvtx_tool.c"), folder / "nvtx_tool.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=120)
    return {"NVTX_INJECTION64_PATH": str(library), "NVTX_TOOL_OUT": str(folder / "ranges")}


def ranges(folder: Path) -> dict[Path, list[tuple[int, str]]]:
    """Return (depth, text) of each range by process, in order of their starts. Checks that all ranges ended."""
    results = {}
    for path in folder.glob("ranges.*"):
        open_ranges: dict[str, list[str]] = {}
        rows: list[tuple[int, str]] = []
        for row in path.read_text().splitlines():
            what, _, rest = row.partition(" ")
            if what == "push":
                thread, _, text = rest.split(" ", 2)
                rows.append((len(open_ranges.setdefault(thread, [])), text))
                open_ranges[thread].append(text)
            elif what == "pop":
                assert open_ranges[rest], f"{path}: a pop without a push"
                open_ranges[rest].pop()
        assert not any(open_ranges.values()), f"{path}: {open_ranges} were never left"
        results[path] = rows
    return results
