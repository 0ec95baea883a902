"""One object in place of another in the loaded modules of the packages that are named, and back."""

import inspect
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from types import ModuleType
from typing import Any

# Held while patches are applied or undone. Reentrant, because a patch may import a module that patches.
LOCK = threading.RLock()


class GlobalPatch:
    """`replacement` wherever another package's function or class is a global of one of that package's modules.

    Modules that have imported the name hold it as a global of their own, so replacing it where it is defined is not
    enough. Modules of other packages keep what they have imported, unless they are named too.

    Args:
        replacement: what takes the place.
        find: -> the object to replace; raises where the package is not installed or not as expected.
        modules: names of packages and modules; a package stands for all modules inside it.
    """

    def __init__(self, replacement: Any, find: Callable[[], Any], modules: Collection[str]) -> None:
        self._replacement = replacement
        self._find = find
        self._home = frozenset(modules)
        self._patched: frozenset[str] = frozenset()
        self._original: Any = None
        self._had_replacement: set[tuple[Any, str]] = set()

    @property
    def applied(self) -> bool:
        return self._original is not None

    @property
    def original(self) -> Any:
        """What has been replaced; RuntimeError where nothing is."""
        original = self._original
        if original is None:
            raise RuntimeError(f"{self._replacement} was called after it had been taken back")
        return original

    def apply(self, also: Collection[str] = ()) -> None:
        """Harmless where it is applied already, except that the modules in `also` join."""
        apply_all(self, also=also)

    def undo(self) -> None:
        """Put the original back in every module that was patched or has imported the replacement from one since.

        Harmless where nothing is applied.
        """
        with LOCK:
            if not self.applied:
                return
            for module, name in self._globals_with(self._replacement, self._patched):
                if (module, name) not in self._had_replacement:
                    setattr(module, name, self._original)
            self._original, self._patched, self._had_replacement = None, frozenset(), set()

    @contextmanager
    def within(self, also: Collection[str] = ()) -> Iterator[None]:
        """Applied inside, and afterwards as it was before."""
        with LOCK:
            before = self._patched
            self.apply(also)
        try:
            yield
        finally:
            with LOCK:
                if self._patched != before:
                    self.undo()
                if before:
                    self.apply(before)

    def _put(self, original: Any, also: frozenset[str]) -> None:
        joining = (self._home | also) - self._patched
        self._had_replacement.update(self._globals_with(self._replacement, joining))
        self._original, self._patched = original, self._patched | joining
        for module, name in self._globals_with(original, self._patched):
            setattr(module, name, self._replacement)

    def _globals_with(self, value: Any, names: Collection[str]) -> list[tuple[Any, str]]:
        inside = tuple(f"{name}." for name in names)
        return [
            (module, name)
            for key, module in list(sys.modules.items())
            if (key in names or key.startswith(inside)) and isinstance(module, ModuleType)
            # Not getattr, which would make lazy modules load what they have not loaded.
            for name, held in list(vars(module).items())
            if held is value
        ]


class MethodPatch(GlobalPatch):
    """`replacement` for a method of another package's class: objects of it, made before or later, have it, too.

    Args:
        replacement: a function; its first parameter is the object.
        find: -> the class, whose own dictionary has the method; raises as in `GlobalPatch`.
        name: of the method.
    """

    def __init__(self, replacement: Any, find: Callable[[], Any], name: str = "forward") -> None:
        super().__init__(replacement, self._method, modules=(name,))
        self._find_owner, self._name = find, name

    def _method(self) -> Any:
        self._owner = self._find_owner()
        return vars(self._owner)[self._name]

    def _globals_with(self, value: Any, names: Collection[str]) -> list[tuple[Any, str]]:
        found = vars(self._owner).get(self._name)
        return [(self._owner, self._name)] if names and found is value else []


def undo_all(*patches: GlobalPatch) -> None:
    with LOCK:
        for patch in patches:
            patch.undo()


@contextmanager
def all_within(*patches: GlobalPatch) -> Iterator[None]:
    """`apply_all` inside, and afterwards as it was before."""
    with LOCK:
        before = all(patch.applied for patch in patches)
        apply_all(*patches)
    try:
        yield
    finally:
        (apply_all if before else undo_all)(*patches)


def apply_all(*patches: GlobalPatch, also: Collection[str] = ()) -> None:
    """All of them or, where one does not find what it replaces, none."""
    if isinstance(also, str) or not all(isinstance(name, str) for name in also):
        raise TypeError(f"modules must be names of modules, such as ('my_trainer',), got {also!r}")
    with LOCK:
        originals = [patch.original if patch.applied else patch._find() for patch in patches]
        for patch, original in zip(patches, originals, strict=True):
            patch._put(original, frozenset(also))


def check_parameters(name: str, function: Any, expected: tuple[str, ...]) -> None:
    """Raises RuntimeError unless the function of that name takes the parameters of those names, in their order."""
    found = tuple(inspect.signature(function).parameters) if callable(function) else (str(function),)
    if found != expected:
        raise RuntimeError(f"{name} must take ({', '.join(expected)}), found ({', '.join(found)}); nothing was patched")


def installed_version(*packages: str) -> str | None:
    """Of the first that is installed; None where none is."""
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    return None


def class_with(home: ModuleType, name: str, method: str, expected: tuple[str, ...]) -> Any:
    """-> the class of that name; RuntimeError unless it has the method, with the parameters that are expected."""
    found = getattr(home, name, None)
    check_parameters(f"{home.__name__}.{name}.{method}", getattr(found, method, None), expected)
    return found


def check_version(
    package: str, version: str | None, lowest: tuple[int, int], below: tuple[int, int], *, older: str = ""
) -> tuple[int, int]:
    """-> major and minor number; ImportError unless lowest <= these < below. `older` says what else to do."""
    supported = f"{package} >= {'.'.join(map(str, lowest))}, < {'.'.join(map(str, below))}"
    match = re.match(r"(\d+)\.(\d+)", version or "")
    found = None if match is None else (int(match[1]), int(match[2]))
    if found is None or not lowest <= found < below:
        hint = older if found is not None and found < lowest else ""
        raise ImportError(f"{supported} is supported, found {version}; nothing was patched{hint}")
    return found
