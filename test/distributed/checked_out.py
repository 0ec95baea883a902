"""Other frameworks' own code, for tests of ranks: installed, or from a folder that LIGER_RL_CHECKOUTS names.

The folder holds checkouts, or unpacked wheels, by the names of their repositories. CHECKED says what ours were read and
tested with.
"""

import importlib.util
import os
from functools import cache
from pathlib import Path

import pytest

CHECKED = {
    "Megatron-LM": "the wheels of megatron-core 0.18.2 and 0.19.2",
    "RL": "NVIDIA-NeMo/RL at v0.7.0 and at 7ea279abfb",
    "SkyRL": "NovaSky-AI/SkyRL at skyrl-v0.3.0 and at a9564572eb",
}
PACKAGES = {"Megatron-LM": "megatron", "RL": "nemo_rl", "SkyRL": "skyrl"}


@cache  # asked for the first time before anything takes a package's place
def folder(repository: str) -> str | None:
    """The one with the package in it; None where there is none."""
    path = Path(os.environ.get("LIGER_RL_CHECKOUTS", os.devnull), repository)
    if path.is_dir():
        return str(path)
    spec = importlib.util.find_spec(PACKAGES[repository])
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    return str(Path(places[0]).parent) if places else None


def needs(repository: str) -> pytest.MarkDecorator:
    """A mark of tests."""
    reason = f"{PACKAGES[repository]} is neither installed nor in LIGER_RL_CHECKOUTS ({CHECKED[repository]})"
    return pytest.mark.skipif(folder(repository) is None, reason=reason)
