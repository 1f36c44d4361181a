"""Just-in-time compilation of scalar loops by numba: at the first call, cached on disk.

The only importer of numba. Importing a module that uses `jit` imports and compiles nothing. The machine code is cached
in a private directory of the user (it is code, so owner and mode of the directory are checked), or in NUMBA_CACHE_DIR.
Of the processes on a node that need a kernel at the same time, one compiles it, and the others load it.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, Final, overload

from hpcdist.arrays.gpu.device import is_device_array
from hpcdist.errors import MissingCapabilityError

FEW_KERNELS: Final = 10  # a step of the smallest model has more

_lock = threading.Lock()
_kernels: list["Kernel"] = []
_prepared: str | None = None  # the directory that NUMBA_CACHE_DIR names since it was found to be writable


def cache_directory() -> Path:
    """Return the directory of compiled kernels: node-local and per user unless NUMBA_CACHE_DIR names another."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    return Path(chosen) if chosen else _private(tempfile.gettempdir())


def _private(folder: str) -> Path:
    return Path(folder) / f"hpcdist-numba-{os.getuid()}"


def prepare_cache() -> bool:
    """Create the cache directory; return whether there is one. Refuses one that another user could have written to.

    Where it cannot be written, the processes of this user on the node share one in a temporary directory instead:
    otherwise numba would compile all kernels again in each of them.
    """
    global _prepared
    chosen, sources = os.environ.get("NUMBA_CACHE_DIR"), _digest_of_sources()
    if _prepared is not None and _prepared == chosen:
        return True
    wanted = cache_directory()
    reason = "" if chosen else _why_not_private(wanted)
    if wanted.name != sources:  # a process that this one started finds the name already there
        wanted /= sources
    reason = reason or _why_not_writable(wanted)
    if not reason:
        os.environ["NUMBA_CACHE_DIR"] = _prepared = str(wanted)
        return True
    for folder in (tempfile.gettempdir(), "/dev/shm"):
        private = _private(folder)
        instead = private / sources
        if instead == wanted or _why_not_private(private):
            continue
        is_first = _copy_cache(
            wanted, instead
        )  # this process is the first on the node; the others, and later ones, share its cache
        if not _why_not_writable(instead):
            if is_first:
                _warn(f"{wanted} cannot be written ({reason}): compiled kernels are kept in {instead}, for this node")
            os.environ["NUMBA_CACHE_DIR"] = _prepared = str(instead)
            return True
    _warn(f"{wanted} cannot be written ({reason}), nor a temporary directory: each process compiles its kernels anew")
    return False


def _why_not_private(directory: Path) -> str:
    """Make ``directory``, and return why that is not possible; "" where it is.

    Raises MissingCapabilityError for one that others can write.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise MissingCapabilityError(
            f"{directory} is not a private directory of this user, and it holds code; "
            "remove it, or set NUMBA_CACHE_DIR to a directory that only you can write"
        )
    return ""


def _why_not_writable(directory: Path) -> str:
    """Make ``directory``, and return why no file can be made in it; "" where one can."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _copy_cache(source: Path, directory: Path) -> bool:
    """Make ``directory`` as a copy of ``source``, empty where there is none; False where it was there already.

    numba reads no kernels where it cannot write any, even if somebody has compiled all of them.
    """
    if directory.exists():
        return False
    new = None
    try:
        new = tempfile.mkdtemp(dir=directory.parent)
        if source.is_dir():
            with contextlib.suppress(shutil.Error):  # some of it: the rest is compiled
                shutil.copytree(source, new, dirs_exist_ok=True)
        os.rename(new, directory)
    except OSError:
        if new is not None:
            shutil.rmtree(new, ignore_errors=True)
        return False
    return True


def _warn(text: str) -> None:
    sys.stderr.write(f"hpcdist: {text}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def _locked(function: Callable[..., Any], how: int) -> Iterator[None]:
    """Hold the lock of ``function`` among the processes with this cache: fcntl.LOCK_EX, or LOCK_SH for readers (local).

    numba reads the index of a function's code and writes it anew: one of two writers would lose what the other keeps.
    """
    name = Path(os.environ["NUMBA_CACHE_DIR"]) / f"{function.__module__}.{function.__qualname__}.lock"
    with contextlib.ExitStack() as lock:
        with contextlib.suppress(OSError):  # a full disk, a file system without locks
            fcntl.flock(lock.enter_context(name.open("w")), how)
        yield


def _compile_once(function: Callable[..., Any], dispatcher: Any) -> None:
    """Let one process with this cache compile ``function``; the others wait for it and load its code (local).

    Processes that find the code load it side by side: on a node with many ranks, one after another would take seconds.
    """
    load, compile_for, here = dispatcher._cache.load_overload, dispatcher.compile, threading.local()

    def load_or_wait(signature: Any, context: Any) -> Any:
        with _locked(function, fcntl.LOCK_SH):
            found = load(signature, context)
        if found is None:
            here.compiling.enter_context(_locked(function, fcntl.LOCK_EX))
            found = load(signature, context)  # another process may have compiled it meanwhile
        return found

    def compile_alone(signature: Any) -> Any:
        with contextlib.ExitStack() as here.compiling:
            return compile_for(signature)

    dispatcher._cache.load_overload, dispatcher.compile = load_or_wait, compile_alone


@functools.cache
def _digest_of_sources() -> str:
    """Return a name for the text of all modules with kernels.

    numba sees only whether the file of a kernel has changed, and not those of the kernels that it calls; and the files
    of two releases may have the same times.
    """
    package = Path(__file__).parents[1]
    sources = {path: path.read_bytes() for path in sorted(package.rglob("*.py"))}
    text = hashlib.blake2b(digest_size=8)
    for path, source in sources.items():
        if b"arrays.jit" in source or path.samefile(__file__):
            text.update(str(path.relative_to(package)).encode() + source)
    return text.hexdigest()


class Primitive:
    """An instruction that numba does not offer, to be called inside compiled functions; ``build(numba)`` makes it."""

    def __init__(self, build: Callable[[Any], Any], doc: str) -> None:
        self.__doc__ = doc
        self._build = build

    @functools.cached_property
    def intrinsic(self) -> Any:
        """The numba intrinsic that stands in for this object in compiled functions."""
        import numba

        return self._build(numba)

    def __call__(self, *args: Any) -> Any:
        """Raise TypeError: only compiled code can call it."""
        raise TypeError(f"to be called inside a function under arrays.jit only: {self.__doc__}")


class Kernel:
    """A function that is compiled for the types of its arguments when it is first called with them."""

    __name__: str

    def __init__(self, function: Callable[..., Any], fastmath: bool | set[str]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.fastmath = fastmath
        self._compiled: Callable[..., Any] | None = None
        self._inner: Any = None
        self._exported: dict[tuple[str, ...], Any] = {}
        self._samples: list[Callable[..., tuple[Any, ...]]] = []
        self._addressed: list[tuple[str, ...]] = []
        _kernels.append(self)

    @property
    def compiled(self) -> Callable[..., Any]:
        """The numba dispatcher, made at the first use; other kernels call it from inside theirs."""
        if self._compiled is None:
            with _lock:
                if self._compiled is None:
                    is_cached = prepare_cache()
                    import numba  # 0.4 s: paid by the first kernel, not by `hpcdist --help`
                    import numba.extending

                    dispatcher: Any = numba.njit(
                        _linked(self.function, numba),
                        nogil=True,
                        cache=is_cached,
                        fastmath=self.fastmath,
                        error_model="numpy",  # a check for zero before every division keeps loops scalar
                    )
                    if is_cached:
                        _compile_once(self.function, dispatcher)
                    self._compiled = dispatcher
        return self._compiled

    def inner(self, numba: Any) -> Any:
        """Return the numba function that other kernels call, one for all callers, so that it is compiled once.

        The caller holds the lock of this module.
        """
        if self._inner is None:
            linked = _linked(self.function, numba)
            self._inner = numba.njit(
                linked, fastmath=self.fastmath, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
            )
        return self._inner

    def address(self, *types: str) -> int:
        """Return the address of the machine code for these argument types, for `intrinsics.call`; its result is void.

        Types are numba's by name; a star behind the name makes it a pointer. The code lives as long as the process.
        """
        with _lock:
            if types not in self._exported:
                is_cached = prepare_cache()
                import numba
                import numba.extending

                known = [getattr(numba.types, name.rstrip("*")) for name in types]
                taken = [
                    numba.types.CPointer(kind) if name.endswith("*") else kind
                    for kind, name in zip(known, types, strict=True)
                ]
                export = numba.cfunc(
                    numba.types.void(*taken), cache=is_cached, fastmath=self.fastmath, error_model="numpy", nogil=True
                )
                alone = _locked(self.function, fcntl.LOCK_EX) if is_cached else contextlib.nullcontext()
                with alone:
                    self._exported[types] = export(_linked(self.function, numba))
            return int(self._exported[types].address)

    def __call__(self, *args: Any) -> Any:
        """Run the compiled function. Raises TypeError for an array on a GPU: the caller has missed its own branch."""
        try:
            return (self._compiled or self.compiled)(*args)
        except Exception as error:
            if any(is_device_array(arg) for arg in args):
                raise TypeError(
                    f"{self.__name__} is a loop of the CPU, and got an array on a GPU; "
                    "ask hpcdist.arrays.backend.is_device and compute with its namespace there"
                ) from error
            raise

    def sample(self, arguments: Callable[..., tuple[Any, ...]]) -> None:
        """Register arguments with which `warm` calls the kernel, once for each set of types."""
        self._samples.append(arguments)

    def sample_address(self, *types: str) -> None:
        """Register argument types for which `warm` asks `address`."""
        self._addressed.append(types)


def _linked(function: Callable[..., Any], numba: Any) -> FunctionType:
    """Return ``function`` with the kernels and primitives that it names replaced by what numba can call."""
    assert isinstance(function, FunctionType)
    names = {**function.__globals__}
    for name in function.__code__.co_names:
        value = names.get(name)
        if isinstance(value, Kernel):
            names[name] = value.inner(numba)
        elif isinstance(value, Primitive):
            names[name] = value.intrinsic
    linked = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    linked.__qualname__, linked.__module__ = function.__qualname__, function.__module__
    return linked


FastMath = bool | set[str]  # all of LLVM's fast-math flags, or those named


@overload
def jit(function: Callable[..., Any]) -> Kernel: ...
@overload
def jit(*, fastmath: FastMath = False) -> Callable[[Callable[..., Any]], Kernel]: ...
def jit(function: Callable[..., Any] | None = None, *, fastmath: FastMath = False) -> Any:
    """Decorate a scalar-loop function: ``@jit`` or ``@jit(fastmath=True)``. The GIL is released while it runs.

    Full ``fastmath`` lets the compiler assume that there is no NaN; name the flags where one must stay visible.
    """
    if function is None:
        return lambda inner: Kernel(inner, fastmath)
    return Kernel(function, fastmath)


def is_cold() -> bool:
    """Return whether hardly any kernel of this version lies in the cache of this process: a step compiles (local)."""
    folder = cache_directory()
    sources = _digest_of_sources()
    folder = folder if folder.name == sources else folder / sources
    return sum(1 for _ in folder.rglob("*.nbi")) < FEW_KERNELS


def count() -> int:
    """Return the number of registered kernels."""
    return len(_kernels)


def warm(part: int = 0, parts: int = 1) -> Iterator[str]:
    """Compile the registered kernels for their samples into the cache; yield the name of each when it is done.

    Processes that share the work each take one of ``parts``: every so many kernels, beginning with ``part``.
    """
    for kernel in _kernels[part::parts]:
        for arguments in kernel._samples:
            kernel(*arguments())
        for types in kernel._addressed:
            kernel.address(*types)
        yield kernel.__name__
