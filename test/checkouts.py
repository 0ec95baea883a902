"""verl's own code, for tests beside ours: from a checkout, without what its packages import at once.

LIGER_RL_CHECKOUTS names a folder with a checkout or an unpacked wheel in its folder `verl`. An installed verl is found
without it. Our integration was tested with verl-project/verl at 1dda039b9c (0.10.0.dev), and with the wheel of 0.9.1.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest


@cache  # asked for the first time before anything takes verl's place
def _verl() -> Path | None:
    checkout = Path(os.environ.get("LIGER_RL_CHECKOUTS", os.devnull), "verl", "verl")
    if checkout.is_dir():
        return checkout
    spec = importlib.util.find_spec("verl")
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(places[0]) if places else None


def verl() -> Path:
    """The folder of the package; skips the test where there is none."""
    folder = _verl()
    if folder is None:
        pytest.skip("verl is not installed and LIGER_RL_CHECKOUTS has no verl")
    return folder


def say_version(monkeypatch: pytest.MonkeyPatch, distribution: str, version: str | None) -> None:
    """What `importlib.metadata.version` says of it, as of a checkout without metadata; None: it is not installed."""
    installed = metadata.version

    def said(name: str) -> str:
        if name != distribution:
            return installed(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", said)


@contextmanager
def bare(root: Path, *names: str) -> Iterator[ModuleType]:
    """`names`, such as "verl" and "verl.utils", as packages at `root` whose __init__ is not run; forgotten afterwards.

    Their own modules are imported as ever.
    """
    top = names[0]
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == top}
    for name in before:
        del sys.modules[name]
    try:
        for name in names:
            module = ModuleType(name)
            module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = module
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
        yield sys.modules[top]
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == top]:
            del sys.modules[name]
        sys.modules.update(before)
