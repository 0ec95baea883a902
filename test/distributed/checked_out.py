"""Other frameworks' own code, where LIGER_RL_CHECKOUTS is a folder that holds it, by the names of their repositories.

A checkout, or an unpacked wheel. CHECKED says what our integrations were read and tested with.
"""

import os
from pathlib import Path

import pytest

CHECKED = {
    "Megatron-LM": "the wheels of megatron-core 0.18.2 and 0.19.2",
    "RL": "NVIDIA-NeMo/RL at 7ea279abfb",
    "SkyRL": "NovaSky-AI/SkyRL at a9564572eb (0.3.0)",
}


def folder(repository: str) -> str | None:
    """Of the repository; None where there is none."""
    path = Path(os.environ.get("LIGER_RL_CHECKOUTS", os.devnull), repository)
    return str(path) if path.is_dir() else None


def needs(repository: str) -> pytest.MarkDecorator:
    """A mark of tests."""
    reason = f"LIGER_RL_CHECKOUTS has no {repository} ({CHECKED[repository]})"
    return pytest.mark.skipif(folder(repository) is None, reason=reason)
