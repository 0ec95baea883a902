"""verl's Triton kernels for log-probability and entropy of an lm_head, loaded without the rest of verl."""

import importlib.util
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from torch import Tensor

from benchmark.cases import Case
from benchmark.inputs import Inputs
from benchmark.peers.peer import Head as Base
from benchmark.peers.peer import Values, import_reason, over_live_rows

KERNELS = "verl.utils.kernel.linear_cross_entropy"


class Head(Base):
    devices = ("cuda",)
    softcap = False
    entropy = True

    def missing(self) -> str | None:
        return import_reason("verl", _kernels)

    def values(self, case: Case, inputs: Inputs, *, entropy: bool = False) -> Values:
        apply = _kernels().linear_cross_entropy

        def operator(hidden: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            return apply(hidden, inputs.weight, ids, 1.0, "none", None)  # entropies come unasked

        return Values(*over_live_rows(inputs, operator))


def _kernels() -> ModuleType:
    return verl_module(KERNELS)


def verl_module(name: str) -> ModuleType:
    """A module of verl. Two packages above it would import ray and more, so they are stood in for."""
    if "verl" not in sys.modules:
        spec = importlib.util.find_spec("verl")
        if spec is None or spec.origin is None:
            raise ImportError("No module named 'verl'")
        root = Path(spec.origin).parent
        for package_name, folder in (("verl", root), ("verl.utils", root / "utils")):
            package = ModuleType(package_name)
            package.__path__ = [str(folder)]
            sys.modules[package_name] = package
    return import_module(name)
