"""One object in place of another in every loaded module that has it, and back."""

import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class GlobalPatch:
    """`replacement` wherever another package's function or class is a global of a loaded module.

    Whoever imported the name before has it as a global of their own, so the place it comes from is not enough.

    Args:
        replacement: what takes the place.
        find: -> the object to replace; raises where the package is not installed or not of a version that is known.
        modules: names of the only modules where it is replaced; None: every one.
    """

    def __init__(self, replacement: Any, find: Callable[[], Any], modules: Collection[str] | None = None) -> None:
        self._replacement = replacement
        self._find = find
        self._modules = modules
        self._original: Any = None
        self._had_replacement: set[tuple[ModuleType, str]] = set()

    @property
    def applied(self) -> bool:
        return self._original is not None

    @property
    def original(self) -> Any:
        """What has been replaced; RuntimeError where nothing is."""
        if not self.applied:
            raise RuntimeError(f"{self._replacement} was called after it had been taken back")
        return self._original

    def apply(self) -> None:
        """Harmless where it is applied already."""
        if self.applied:
            return
        original = self._find()
        self._had_replacement = set(self._globals_with(self._replacement))
        self._original = original
        for module, name in self._globals_with(original):
            setattr(module, name, self._replacement)

    def undo(self) -> None:
        """Modules that imported the name in between get the original too. Harmless where nothing is applied."""
        if not self.applied:
            return
        for module, name in self._globals_with(self._replacement):
            if (module, name) not in self._had_replacement:
                setattr(module, name, self._original)
        self._original, self._had_replacement = None, set()

    @contextmanager
    def within(self) -> Iterator[None]:
        """Applied inside, and afterwards as it was before."""
        before = self.applied
        self.apply()
        try:
            yield
        finally:
            if not before:
                self.undo()

    def _globals_with(self, value: Any) -> list[tuple[ModuleType, str]]:
        return [
            (module, name)
            for key, module in list(sys.modules.items())
            if isinstance(module, ModuleType) and (self._modules is None or key in self._modules)
            # Not getattr, which would make lazy modules load what they have not loaded.
            for name, held in list(vars(module).items())
            if held is value
        ]


def check_version(package: str, version: str | None, lowest: tuple[int, int], below: tuple[int, int]) -> None:
    """Raises ImportError unless lowest <= version < below, by major and minor number."""
    supported = f"{package} >= {'.'.join(map(str, lowest))}, < {'.'.join(map(str, below))}"
    found = re.match(r"(\d+)\.(\d+)", version or "")
    if found is None or not lowest <= (int(found[1]), int(found[2])) < below:
        raise ImportError(f"{supported} is supported, found {version}; nothing was patched")
