"""Which GPUs CUDA_VISIBLE_DEVICES means, by UUID: the indices of CUDA are not those of the driver. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpcdist.errors import MissingCapabilityError

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
INSTANCE = "MIG-"


@dataclass(frozen=True)
class Gpu:
    """A GPU of this node, in the order of NVML (that of the PCI bus). ``partitioned``: it is in MIG mode."""

    uuid: str
    name: str
    partitioned: bool


def visible(
    gpus: Sequence[Gpu], environment: Mapping[str, str], parent: Callable[[str], str | None]
) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that CUDA_VISIBLE_DEVICES names, in its order; none when it is not set.

    As CUDA reads it: comma separated indices or (beginnings of) UUIDs, ended by the first that names no GPU. A MIG
    instance stands for the GPU that it is a part of: ``parent`` tells which. Raises MissingCapabilityError where the
    indices cannot be understood.
    """
    seen: list[str] = []
    chosen: list[str] = []
    for entry in (environment.get(VISIBLE) or "").split(","):
        name = entry.strip()
        uuid = parent(name) if name.startswith(INSTANCE) else _named(name, gpus, environment)
        same = name if name.startswith(INSTANCE) else uuid  # two instances may be parts of one GPU
        if uuid is None or same is None or same in seen:
            break
        seen.append(same)
        if uuid not in chosen:
            chosen.append(uuid)
    return tuple(chosen)


def _named(entry: str, gpus: Sequence[Gpu], environment: Mapping[str, str]) -> str | None:
    """Return the UUID that ``entry`` means, None for none."""
    if entry.startswith("GPU-"):
        fits = [gpu.uuid for gpu in gpus if gpu.uuid.startswith(entry)]
        return fits[0] if len(fits) == 1 else None
    if not (entry.isascii() and entry.isdigit()) or int(entry) >= len(gpus):
        return None
    if environment.get(ORDER) != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1:
        raise MissingCapabilityError(
            f"{VISIBLE} names a GPU by index, and CUDA numbers unlike GPUs by speed; export {ORDER}=PCI_BUS_ID, "
            "or name it by UUID"
        )
    return gpus[int(entry)].uuid
