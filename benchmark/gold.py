"""What every variant is compared with: a case in float64, on the same rounded inputs, a few rows at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmark import oracle
from benchmark.cases import STEP, Case
from benchmark.inputs import Inputs
from benchmark.loss import grpo_loss

# Of the batch a gold is made for at most: on CUDA whole batches, on CPU what float64 is fast enough for.
GOLD_ROWS = {"cpu": 128, "cuda": 8192}
LOGITS_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Gold:
    """float64 throughout; gradients are None where the case has none."""

    logps: Tensor  # (B, T)
    entropy: Tensor  # (B, T)
    loss: Tensor  # ()
    grad_hidden: Tensor | None  # (B, T, H)
    grad_weight: Tensor | None  # (V, H)


def gold_of(case: Case, inputs: Inputs, loss_fn: Callable[[Tensor, Inputs], Tensor] = grpo_loss) -> Gold:
    hidden, weight = inputs.hidden.detach().flatten(0, 1), inputs.weight.detach().double()
    ids = inputs.ids.flatten()
    step = max(1, LOGITS_BYTES // (8 * case.vocab))
    spans = [slice(start, start + step) for start in range(0, case.rows, step)]

    parts = [oracle.logprobs(hidden[s].double(), weight, ids[s], case.softcap) for s in spans]
    logps, entropy = (torch.cat(part).view(inputs.ids.shape) for part in zip(*parts, strict=True))
    del parts
    leaf = logps.clone().requires_grad_()
    loss = loss_fn(leaf, inputs)
    grad_hidden = grad_weight = None
    if case.task == STEP:
        (grad_logps,) = torch.autograd.grad(loss, leaf)
        grad_logps = grad_logps.flatten()
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
        grad_weight = None if case.frozen else torch.zeros_like(weight)
        weight.requires_grad_(grad_weight is not None)
        for s in spans:
            rows = hidden[s].double().requires_grad_()
            span_logps, _ = oracle.logprobs(rows, weight, ids[s], case.softcap)
            leaves = (rows,) if grad_weight is None else (rows, weight)
            grads = torch.autograd.grad(span_logps, leaves, grad_logps[s])
            grad_hidden[s] = grads[0]
            if grad_weight is not None:
                grad_weight += grads[1]
        grad_hidden = grad_hidden.view(inputs.hidden.shape)
    return Gold(logps=logps, entropy=entropy, loss=loss.detach(), grad_hidden=grad_hidden, grad_weight=grad_weight)
