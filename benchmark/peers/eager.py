"""Full logits, as training code on HuggingFace models has them: product in the model's dtype, softmax in float32."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmark.cases import Case
from benchmark.inputs import Inputs
from benchmark.loss import grpo_loss
from benchmark.peers.peer import Head as Base
from benchmark.peers.peer import Values, softcapped


class Head(Base):
    """As it stands, or the same code through torch.compile."""

    entropy = True

    def __init__(self, *, compiled: bool = False) -> None:
        self.compiled = compiled
        self.devices = ("cuda",) if compiled else ("cpu", "cuda")
        self._loss: Callable[[Case, Inputs], Tensor] = self._optimised(_loss)
        self._values: Callable[[Case, Inputs, bool], Values] = self._optimised(_values)

    def _optimised(self, function: Callable) -> Callable:
        return torch.compile(function, dynamic=False) if self.compiled else function

    def values(self, case: Case, inputs: Inputs, *, entropy: bool = False) -> Values:
        return self._values(case, inputs, entropy)

    def make(self, case: Case, inputs: Inputs) -> Callable[[], Tensor]:
        return lambda: self._loss(case, inputs)


def _values(case: Case, inputs: Inputs, entropy: bool) -> Values:
    log_p = torch.log_softmax(softcapped(inputs.hidden @ inputs.weight.T, case).float(), dim=-1)
    logps = log_p.gather(-1, inputs.ids[..., None]).squeeze(-1)
    return Values(logps, -(log_p.exp() * log_p).sum(-1) if entropy else None)


def _loss(case: Case, inputs: Inputs) -> Tensor:
    return grpo_loss(_values(case, inputs, False).logps, inputs)
