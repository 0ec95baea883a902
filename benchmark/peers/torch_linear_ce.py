"""torch.nn.functional.linear_cross_entropy, chunked over tokens as its automatic options choose."""

import torch
from torch import Tensor

from benchmark.cases import Case
from benchmark.inputs import Inputs
from benchmark.peers.peer import Head as Base
from benchmark.peers.peer import Values, over_live_rows


class Head(Base):
    softcap = False

    def missing(self) -> str | None:
        if not hasattr(torch.nn.functional, "linear_cross_entropy"):
            return f"torch {torch.__version__} has no linear_cross_entropy"
        return None

    def values(self, case: Case, inputs: Inputs, *, entropy: bool = False) -> Values:
        options = torch.nn.LinearCrossEntropyOptions()

        def operator(hidden: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            nll = torch.nn.functional.linear_cross_entropy(
                hidden, inputs.weight, ids, reduction="none", options=options
            )
            return (-nll.float(),)

        return Values(*over_live_rows(inputs, operator))
