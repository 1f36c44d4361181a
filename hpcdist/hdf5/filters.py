"""Filters of HDF5 datasets: which of them this Python cannot read through, and what they come with.

HDF5 brings deflate, shuffle and such, and h5py lzf; others are plugins, most of them in the package hdf5plugin.
"""

import importlib
import sys
from typing import Final

import h5py

from hpcdist.errors import MissingCapabilityError
from hpcdist.reporting.regular import BROKEN

PACKAGE: Final = "hdf5plugin"
NAMES: Final = {
    307: "bzip2",
    32001: "blosc",
    32004: "lz4",
    32008: "bitshuffle",
    32013: "zfp",
    32015: "zstd",
    32017: "sz",
    32018: "fcidecomp",
    32024: "sz3",
    32026: "blosc2",
    32028: "sperr",
    32033: "htj2k",
}  # by the numbers that the HDF Group has registered; those that hdf5plugin has


def check(dataset: h5py.Dataset) -> None:
    """Raise MissingCapabilityError where ``dataset`` has a filter that is not there, with what brings it.

    The package is imported where it is installed, which makes its filters known. An optional filter that was not there
    when the dataset was written, either, is not needed: its elements can be read.
    """
    if not _missing(dataset):
        return
    problem = _import()
    missing = _missing(dataset)
    if not missing or _reads(dataset):
        return
    code, name = next(iter(missing.items()))
    what = f"{dataset.file.filename}: dataset {dataset.name} has the HDF5 filter {NAMES.get(code, name)} ({code})"
    if code in NAMES and problem:
        raise MissingCapabilityError(f"{what}, for which {sys.executable} needs the module {PACKAGE}: {problem}")
    raise MissingCapabilityError(f"{what}, which is not known here: set HDF5_PLUGIN_PATH to the folder of its plugin")


def _missing(dataset: h5py.Dataset) -> dict[int, str]:
    """Return the filters of ``dataset`` that cannot decode here, with the names that its writer gave them."""
    properties = dataset.id.get_create_plist()
    found = {}
    for place in range(properties.get_nfilters()):
        code, _, _, name = properties.get_filter(place)
        decodes = h5py.h5z.filter_avail(code) and (
            h5py.h5z.get_filter_info(code) & h5py.h5z.FILTER_CONFIG_DECODE_ENABLED
        )
        if not decodes:
            found[code] = name.decode(errors="replace").split(" ")[0][:40]
    return found


def _import() -> str:
    """Import the package; return what to do where that does not work, "" where it does."""
    try:
        importlib.import_module(PACKAGE)
    except ModuleNotFoundError:
        return "pip install 'hpcdist[hdf5]'"
    except (ImportError, *BROKEN) as error:  # as one that was made for another HDF5 than that of h5py
        return f"it is there, and cannot be imported: {error}"
    return ""


def _reads(dataset: h5py.Dataset) -> bool:
    """Whether the first element can be read."""
    try:
        dataset[(0,) * len(dataset.shape)]
    except (OSError, RuntimeError, ValueError, IndexError):
        return not dataset.size  # of an empty one there is nothing to read
    return True
