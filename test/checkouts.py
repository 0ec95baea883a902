"""Other frameworks' own code, for tests beside ours: from a checkout, without what their packages import at once.

LIGER_RL_CHECKOUTS names a folder of checkouts, or of unpacked wheels, by the names of their repositories: the keys of
CHECKED, which says where in them the package is, and with what our integrations were read and tested. A framework that
is installed is found without it.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

CHECKED = {
    "verl": ("verl", "verl-project/verl at 1dda039b9c (0.10.0.dev), and the wheel of 0.9.1"),
    "prime-rl": ("src/prime_rl", "PrimeIntellect-ai/prime-rl at 559b44772e (0.8.0)"),
    "OpenRLHF": ("openrlhf", "the wheel of openrlhf 0.11.2"),
    "axolotl": ("src/axolotl", "axolotl-ai-cloud/axolotl at 067b021c8b, and the wheel of 0.19.0"),
    "ms-swift": ("swift", "modelscope/ms-swift at 3602360a56, and the wheel of 4.6.0"),
    "Megatron-LM": ("megatron", "the wheels of megatron-core 0.18.2 and 0.19.2"),
    "RL": ("nemo_rl", "NVIDIA-NeMo/RL at v0.7.0 and at 7ea279abfb"),
    "SkyRL": ("skyrl", "NovaSky-AI/SkyRL at skyrl-v0.3.0 and at a9564572eb, and the wheel of 0.4.0"),
}


@cache  # asked for the first time before anything takes a package's place
def found(repository: str) -> Path | None:
    """The folder of the package; None where there is none."""
    package = Path(CHECKED[repository][0])
    checkout = Path(os.environ.get("LIGER_RL_CHECKOUTS", os.devnull), repository, package)
    if checkout.is_dir():
        return checkout
    spec = importlib.util.find_spec(package.name)
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(places[0]) if places else None


def needs(repository: str) -> pytest.MarkDecorator:
    """A mark of tests."""
    return pytest.mark.skipif(found(repository) is None, reason=_reason(repository))


def source(repository: str) -> Path:
    """The folder of the package; skips the test where there is none."""
    folder = found(repository)
    if folder is None:
        pytest.skip(_reason(repository))
    return folder


def _reason(repository: str) -> str:
    package, checked = CHECKED[repository]
    return f"{Path(package).name} is not installed and LIGER_RL_CHECKOUTS has no {repository} ({checked})"


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


def project_version(root: Path) -> str:
    """Of the pyproject.toml in that folder."""
    found = re.search(r'^version = "(.+)"$', (root / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


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
