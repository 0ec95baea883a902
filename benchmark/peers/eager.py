"""Full logits, as training code on HuggingFace models has them: product in the model's dtype, softmax in float32."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmark.cases import Case
from benchmark.inputs import Inputs
from benchmark.loss import grpo_loss


def available(case: Case) -> str | None:
    return None


def make(case: Case, inputs: Inputs) -> Callable[[], Tensor]:
    return lambda: grpo_loss(logps(case, inputs), inputs)


def logps(case: Case, inputs: Inputs) -> Tensor:
    logits = inputs.hidden @ inputs.weight.T
    if case.softcap is not None:
        logits = torch.tanh(logits / case.softcap) * case.softcap
    return torch.log_softmax(logits.float(), dim=-1).gather(-1, inputs.ids[..., None]).squeeze(-1)
