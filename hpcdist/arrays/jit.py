"""Just-in-time compilation of scalar loops by numba, which only this module imports.

One process of a node compiles a kernel at its first call. The others load the machine code from a cache on disk. The
owner and mode of a private cache directory are checked, because it holds code.
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

FEW_KERNELS: Final = 10  # a training step of the smallest model uses more kernels

_lock = threading.Lock()
_kernels: list["Kernel"] = []
_prepared: str | None = None  # value of NUMBA_CACHE_DIR that was checked to be writable


def cache_directory() -> Path:
    """Return the cache directory of compiled kernels: $NUMBA_CACHE_DIR, or by default a directory in $TMPDIR. Local."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    return Path(chosen) if chosen else _private(tempfile.gettempdir())


def _private(folder: str) -> Path:
    return Path(folder) / f"hpcdist-numba-{os.getuid()}"


def prepare_cache() -> bool:
    """Create a cache directory for kernels, in /tmp or /dev/shm as a fallback. Return False if none can be created."""
    global _prepared
    chosen, sources = os.environ.get("NUMBA_CACHE_DIR"), _digest_of_sources()
    if _prepared is not None and _prepared == chosen:
        return True
    primary = cache_directory()
    reason = "" if chosen else _why_not_private(primary)
    if primary.name != sources:  # a parent process may have appended the name already
        primary /= sources
    reason = reason or _why_not_writable(primary)
    if not reason:
        os.environ["NUMBA_CACHE_DIR"] = _prepared = str(primary)
        return True
    for folder in (tempfile.gettempdir(), "/dev/shm"):
        private = _private(folder)
        instead = private / sources
        if instead == primary or _why_not_private(private):
            continue
        is_first = _copy_cache(primary, instead)  # other processes on the node share the directory
        if not _why_not_writable(instead):
            if is_first:
                _warn(f"{primary} cannot be written ({reason}): compiled kernels are kept in {instead}, for this node")
            os.environ["NUMBA_CACHE_DIR"] = _prepared = str(instead)
            return True
    _warn(f"{primary} cannot be written ({reason}), nor a temporary directory: each process compiles its kernels anew")
    return False


def _why_not_private(directory: Path) -> str:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise MissingCapabilityError(
            f"{directory} must be accessible only to this user, because it contains code that is executed; "
            "remove it, or set NUMBA_CACHE_DIR to a directory that only you can write"
        )
    return ""


def _why_not_writable(directory: Path) -> str:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _copy_cache(source: Path, directory: Path) -> bool:
    if directory.exists():
        return False
    new = None
    try:
        new = tempfile.mkdtemp(dir=directory.parent)
        if source.is_dir():
            with contextlib.suppress(shutil.Error):  # an incomplete copy: the missing kernels are compiled
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
    name = Path(os.environ["NUMBA_CACHE_DIR"]) / f"{function.__module__}.{function.__qualname__}.lock"
    with contextlib.ExitStack() as lock:
        with contextlib.suppress(OSError):  # a full disk, a file system without locks
            fcntl.flock(lock.enter_context(name.open("w")), how)
        yield


def _compile_once(function: Callable[..., Any], dispatcher: Any) -> None:
    load, compile_for, here = dispatcher._cache.load_overload, dispatcher.compile, threading.local()

    def load_or_wait(signature: Any, context: Any) -> Any:
        with _locked(function, fcntl.LOCK_SH):
            code = load(signature, context)
        if code is None:
            here.compiling.enter_context(_locked(function, fcntl.LOCK_EX))
            code = load(signature, context)  # another process may have compiled it meanwhile
        return code

    def compile_alone(signature: Any) -> Any:
        with contextlib.ExitStack() as here.compiling:
            return compile_for(signature)

    dispatcher._cache.load_overload, dispatcher.compile = load_or_wait, compile_alone


@functools.cache
def _digest_of_sources() -> str:
    # Of all kernel sources: numba misses a change in a kernel that another kernel calls.
    package = Path(__file__).parents[1]
    sources = {path: path.read_bytes() for path in sorted(package.rglob("*.py"))}
    text = hashlib.blake2b(digest_size=8)
    for path, source in sources.items():
        if b"arrays.jit" in source or path.samefile(__file__):
            text.update(str(path.relative_to(package)).encode() + source)
    return text.hexdigest()


class Primitive:
    """Instruction that numba lacks, for use in kernels. ``build(numba)`` creates the numba intrinsic."""

    def __init__(self, build: Callable[[Any], Any], doc: str) -> None:
        self.__doc__ = doc
        self._build = build

    @functools.cached_property
    def intrinsic(self) -> Any:
        import numba

        return self._build(numba)

    def __call__(self, *args: Any) -> Any:
        raise TypeError(
            "Python code cannot call this primitive; call the primitive from a function compiled by "
            f"hpcdist.arrays.jit. The primitive: {self.__doc__}"
        )


class Kernel:
    """Function that numba compiles at the first call with each new combination of argument types."""

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
        """The numba dispatcher of the function, created at the first use."""
        if self._compiled is None:
            with _lock:
                if self._compiled is None:
                    is_cached = prepare_cache()
                    import numba  # takes 0.4 s, only when the first kernel is used
                    import numba.extending

                    dispatcher: Any = numba.njit(
                        _linked(self.function, numba),
                        nogil=True,
                        cache=is_cached,
                        fastmath=self.fastmath,
                        error_model="numpy",  # a check for division by zero would prevent vectorisation
                    )
                    if is_cached:
                        _compile_once(self.function, dispatcher)
                    self._compiled = dispatcher
        return self._compiled

    def inner(self, numba: Any) -> Any:
        """Return this kernel as a numba function that other kernels can call. ``numba``: the imported module."""
        # The caller must hold `_lock`.
        if self._inner is None:
            linked = _linked(self.function, numba)
            self._inner = numba.njit(
                linked, fastmath=self.fastmath, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
            )
        return self._inner

    def address(self, *types: str) -> int:
        """Return the address of this kernel as a C function with argument types ``*types``, for `intrinsics.call`."""
        with _lock:
            if types not in self._exported:
                is_cached = prepare_cache()
                import numba
                import numba.extending

                kinds = [getattr(numba.types, name.rstrip("*")) for name in types]
                params = [
                    numba.types.CPointer(kind) if name.endswith("*") else kind
                    for kind, name in zip(kinds, types, strict=True)
                ]
                export = numba.cfunc(
                    numba.types.void(*params), cache=is_cached, fastmath=self.fastmath, error_model="numpy", nogil=True
                )
                alone = _locked(self.function, fcntl.LOCK_EX) if is_cached else contextlib.nullcontext()
                with alone:
                    self._exported[types] = export(_linked(self.function, numba))
            return int(self._exported[types].address)

    def __call__(self, *args: Any) -> Any:
        try:
            return (self._compiled or self.compiled)(*args)
        except Exception as error:
            if any(is_device_array(arg) for arg in args):
                raise TypeError(
                    f"{self.__name__} runs on the CPU but got an array on a GPU; "
                    "check hpcdist.arrays.backend.is_device(array) and compute with backend.namespace(array) instead"
                ) from error
            raise

    def sample(self, arguments: Callable[..., tuple[Any, ...]]) -> None:
        """Let `warm` call this kernel with example arguments: the tuple that ``arguments()`` returns."""
        self._samples.append(arguments)

    def sample_address(self, *types: str) -> None:
        """Register argument types ``*types``. For these types, `warm` compiles this kernel as `address` does."""
        self._addressed.append(types)


def _linked(function: Callable[..., Any], numba: Any) -> FunctionType:
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


FastMath = bool | set[str]  # True: all of LLVM's fast-math flags; a set: these flags


@overload
def jit(function: Callable[..., Any]) -> Kernel: ...
@overload
def jit(*, fastmath: FastMath = False) -> Callable[[Callable[..., Any]], Kernel]: ...
def jit(function: Callable[..., Any] | None = None, *, fastmath: FastMath = False) -> Any:
    """Decorate a function for compilation by numba: ``@jit`` or ``@jit(fastmath=True)``. The code releases the GIL.

    ``fastmath=True`` assumes that no value is NaN. To propagate NaNs, pass a set of LLVM flags without "nnan".
    """
    if function is None:
        return lambda inner: Kernel(inner, fastmath)
    return Kernel(function, fastmath)


def is_cold() -> bool:
    """Return True if the cache has fewer than `FEW_KERNELS` kernels, so that the first step must compile."""
    folder = cache_directory()
    sources = _digest_of_sources()
    folder = folder if folder.name == sources else folder / sources
    return sum(1 for _ in folder.rglob("*.nbi")) < FEW_KERNELS


def count() -> int:
    """Return the number of functions decorated with `jit`."""
    return len(_kernels)


def warm(first: int = 0, step: int = 1) -> Iterator[str]:
    """Compile the kernels with the indices ``first``, ``first + step``, ``first + 2 step``, ... Yield each name."""
    for kernel in _kernels[first::step]:
        for arguments in kernel._samples:
            kernel(*arguments())
        for types in kernel._addressed:
            kernel.address(*types)
        yield kernel.__name__
