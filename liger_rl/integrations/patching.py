"""Tables of another package's functions and methods with their replacements, and functions that apply a table.

VERL = Framework("verl", (0, 5), (0, 11), Patch("verl.utils.kernel:linear_cross_entropy", ours), gain="float32 logits")
unpatch_verl, patched_verl, is_patched = VERL.unpatch, VERL.within, VERL.is_patched
"""

import importlib
import inspect
import logging
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from types import ModuleType
from typing import Any

Version = tuple[int, int]

logger = logging.getLogger("liger_rl")

# Held while patches are applied or undone. Reentrant, because a patch may import a module that patches.
LOCK = threading.RLock()


def join_parameters(function: Callable) -> str:
    """The names of the function's parameters, in order."""
    return " ".join(inspect.signature(function).parameters)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """In this context the object has an attribute of its own, in front of its class's."""
    before = {key: x for key, x in vars(owner).items() if key == name}
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        vars(owner).update(before)


class Patch:
    """One row of a table: a function, a class or a method of another package, and its replacement.

    A function is replaced in every loaded module of the package, because a module keeps what it imported. A method is
    replaced in its class, also for objects that exist already. `parameters` are the names of the target's parameters
    in order; "" means those of the replacement, None any.
    """

    def __init__(
        self,
        target: str,  # "package.module:function" or "package.module:Class.method"
        replacement: Any,
        parameters: str | None = "",
        *,
        checked: str = "",  # the name in the module whose parameters are checked; the target by default
        modules: Collection[str] = (),  # packages and modules with the function; the target's package by default
        since: Version = (0, 0),  # the lowest version of the package that has the target
        needed: Callable[[], bool] = lambda: True,  # whether to apply the row, called at each `Framework.patch`
    ) -> None:
        self.module, _, self.name = target.partition(":")
        self.replacement, self.checked = replacement, checked or self.name
        self.parameters = join_parameters(replacement) if parameters == "" else parameters
        self.since, self.needed = since, needed
        self.home = frozenset(modules or (self.module.split(".")[0],))
        self.patched = False
        self.owners: set[Framework] = set()  # the tables that have applied the row
        self._original: Any = None  # stays after `undo`: who has imported the replacement still calls it
        self._pristine: Any = None  # the last original that nobody has put around the replacement
        self._is_held = False  # whether another package may have wrapped the replacement
        self._owner: Any = None  # the class of a method

    @property
    def original(self) -> Any:
        """The replaced object; RuntimeError if nothing was ever replaced."""
        original = self._original  # read once: another thread may undo the patch
        if original is None:
            raise RuntimeError(f"{self.replacement} was called before it was put in place")
        return original

    @property
    def pristine(self) -> Any:
        """What the replacement calls while it is not in place, or when it is reached once more in its own call: another
        package may have put a wrapper around it, which is the original now."""
        return self._pristine or self.original

    def find(self) -> Any:
        """The object to replace; ImportError or RuntimeError if it does not exist or takes other parameters."""
        module = importlib.import_module(self.module)
        owner, _, attribute = self.name.rpartition(".")
        self._owner = getattr(module, owner, object) if owner else None
        original = vars(self._owner or module).get(attribute)
        if original is None:
            raise RuntimeError(f"{self.module} has no {self.name} here; nothing was patched")
        if original is self.replacement:
            return self.pristine
        if self.parameters is not None:
            function: Any = module
            for name in self.checked.split("."):
                function = getattr(function, name, None)
            names = join_parameters(function).split() if callable(function) else [str(function)]
            expected = self.parameters.split()
            if names != expected:
                raise RuntimeError(
                    f"{self.module}.{self.checked} must take ({', '.join(expected)}), found ({', '.join(names)}); "
                    "nothing was patched"
                )
        return original

    def put(self, original: Any) -> None:
        """Replace `original` in the modules of the row."""
        self._original, self.patched = original, True
        if not self._is_held:
            self._pristine = original
        for owner, name in self._find_places(original):
            setattr(owner, name, self.replacement)

    def undo(self) -> None:
        """Put the original back everywhere, also in modules that imported the replacement since."""
        if not self.patched:
            return
        self.patched = False
        places = self._find_places(self.replacement)
        self._is_held = self._is_held or (self._owner is not None and not places)
        for owner, name in places:
            setattr(owner, name, self._original)

    def _find_places(self, value: Any) -> list[tuple[Any, str]]:
        if self._owner is not None:
            attribute = self.name.rpartition(".")[2]
            return [(self._owner, attribute)] if vars(self._owner).get(attribute) is value else []
        inside = tuple(f"{name}." for name in self.home)
        return [
            (module, name)
            for key, module in list(sys.modules.items())
            if (key in self.home or key.startswith(inside)) and isinstance(module, ModuleType)
            # vars, because getattr would make lazy modules import.
            for name, held in list(vars(module).items())
            if held is value
        ]


class Framework:
    """The table of one package, for the versions lowest <= version < below."""

    def __init__(
        self,
        name: str,  # of the package as it is installed, such as "liger-kernel"; it is imported as liger_kernel
        lowest: Version,
        below: Version,
        *patches: Patch,  # the rows
        gain: str,  # the advantage over the package's own functions, for the log
        distributions: tuple[str, ...] = (),  # whose metadata has the version; none: `__version__` has it
    ) -> None:
        self.name, self.lowest, self.below, self.patches = name, lowest, below, patches
        self.gain, self.distributions = gain, distributions

    def version(self) -> str:
        """The installed version; ImportError if the package is missing or its version not supported."""
        try:
            package = importlib.import_module(self.name.replace("-", "_"))
        except ImportError as error:
            raise ImportError(f"{self.name} is not installed: {error}; nothing was patched") from error
        version = None if self.distributions else getattr(package, "__version__", None)
        for distribution in self.distributions:
            with suppress(metadata.PackageNotFoundError):
                version = version or metadata.version(distribution)
        return check_version(self.name, version, self.lowest, self.below)

    def patch(self) -> None:
        """Apply the rows: all of them or none. Applied rows stay, and a row that needs a later version is left out.

        New patches are logged to "liger_rl", at the level INFO.
        """
        with LOCK:
            version, originals = self.version(), []
            for patch in self.patches:
                if not patch.needed() or _parse_version(version) < patch.since:
                    continue
                originals.append((patch, patch.original if patch.patched else patch.find()))
            added = [patch.name for patch, _ in originals if not patch.patched]
            for patch, original in originals:
                patch.put(original)
                patch.owners.add(self)
        if added:
            logger.info("patched %s %s: %s; %s", self.name, version, ", ".join(dict.fromkeys(added)), self.gain)

    def unpatch(self) -> None:
        """Undo the patch, also in modules that were loaded since. Harmless if nothing is patched.

        A row that another table has applied, too, stays.
        """
        with LOCK:
            for patch in self.patches:
                patch.owners.discard(self)
                if not patch.owners:
                    patch.undo()

    @contextmanager
    def within(self) -> Iterator[None]:
        """Patch for the length of a `with` block, then restore the state before it."""
        with LOCK:
            before = [(patch, frozenset(patch.owners)) for patch in self.patches]
            self.patch()
        try:
            yield
        finally:
            with LOCK:
                for patch, owners in before:
                    patch.owners = set(owners)
                    if patch.patched != bool(owners):
                        patch.undo()
                        if owners:
                            patch.put(patch.find())

    def is_patched(self) -> bool:
        """Whether the patch is applied."""
        return any(self in patch.owners for patch in self.patches)


def check_version(name: str, version: str | None, lowest: Version, below: Version) -> str:
    """-> version; ImportError unless lowest <= version < below."""
    if version is None or not lowest <= _parse_version(version) < below:
        supported = f"{name} >= {'.'.join(map(str, lowest))}, < {'.'.join(map(str, below))}"
        raise ImportError(f"{supported} is supported, found {version}; nothing was patched")
    return version


def _parse_version(version: str | None) -> tuple[int, ...]:
    """(major, minor); () if the version has none."""
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return () if match is None else (int(match[1]), int(match[2]))
