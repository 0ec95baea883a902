"""liger_rl with its defaults: FusedLinearGRPOLoss, and linear_logprobs where a tolerance is named."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmark.cases import STEP, Case
from benchmark.inputs import Inputs, logit_transform
from benchmark.loss import EPSILON
from benchmark.peers.peer import Head as Base
from benchmark.peers.peer import Values
from liger_rl import FusedLinearGRPOLoss, linear_logprobs


class Head(Base):
    entropy = True

    def __init__(self, *, grad_tolerance: float = 0.0) -> None:
        self.grad_tolerance = grad_tolerance

    def reason(self, case: Case, device: str) -> str | None:
        if self.grad_tolerance and case.task != STEP:
            return "a tolerance is of gradients"
        return super().reason(case, device)

    def missing(self) -> str | None:
        one = torch.ones(1, 1)
        try:
            linear_logprobs(one, one, torch.zeros(1, dtype=torch.long), grad_tolerance=self.grad_tolerance)
        except ValueError as error:
            return str(error)
        return None

    def values(self, case: Case, inputs: Inputs, *, entropy: bool = False) -> Values:
        found = linear_logprobs(
            inputs.hidden,
            inputs.weight,
            inputs.ids,
            mask=inputs.mask,
            transform=logit_transform(case),
            entropy=entropy,
            grad_tolerance=self.grad_tolerance,
        )
        return Values(*found)

    def make(self, case: Case, inputs: Inputs) -> Callable[[], Tensor]:
        if self.grad_tolerance:
            return super().make(case, inputs)
        loss_fn = FusedLinearGRPOLoss(
            loss_type="dapo", beta=case.beta, epsilon_low=EPSILON, epsilon_high=EPSILON, softcap=case.softcap
        )
        return lambda: (
            loss_fn(
                inputs.hidden,
                inputs.weight,
                inputs.ids,
                inputs.advantages,
                inputs.mask,
                old_per_token_logps=inputs.old_logps,
                ref_per_token_logps=inputs.ref_logps,
            ).loss
        )
