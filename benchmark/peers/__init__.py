"""The variants: one module each, with the same three functions.

    available(case) -> str | None                  why the case cannot be run, None if it can
    make(case, inputs) -> Callable[[], Tensor]     forward and loss, ready for .backward()
    logps(case, inputs) -> Tensor | None           (B, T) per-token log-probabilities, None if it exposes none

Labels stand here, so that tables and plots need not import the libraries they name.
"""

from importlib import import_module
from types import ModuleType

LABELS = {"eager": "eager PyTorch", "liger_chunked": "Liger chunked", "ours": "liger_rl"}
BASELINE = "eager"
OURS = "ours"


def load(variant: str) -> ModuleType:
    return import_module(f"benchmark.peers.{variant}")
