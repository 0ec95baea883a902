"""Distance of a variant from float64, on the same rounded inputs and few enough tokens for float64 logits."""

from types import ModuleType

import torch
from torch import Tensor

from benchmark.cases import Case
from benchmark.inputs import Inputs, logit_transform, make_inputs
from benchmark.loss import grpo_loss
from liger_rl.reference import reference_logprobs

ERROR_ROWS = {"cpu": 128, "cuda": 1024}  # on CUDA enough for every path that a whole batch takes


def measure_errors(variant: ModuleType, case: Case, device: str) -> dict[str, float | None]:
    """-> loss and largest log-probability errors in nats, gradients' relative Frobenius errors."""
    # Code that a variant compiled was for the case's own shapes; liger-kernel's cannot be made again for others.
    torch.compiler.reset()
    small = case.with_rows(ERROR_ROWS[device])
    inputs = make_inputs(small, device)
    logps = variant.logps(small, inputs)
    logps = None if logps is None else logps.detach()
    loss = variant.make(small, inputs)()
    loss.backward()
    gold_logps, gold_loss, gold_hidden, gold_weight = _gold(small, inputs)
    return {
        "loss_error": abs(loss.item() - gold_loss.item()),
        "logp_max_error": None if logps is None else (logps - gold_logps)[inputs.mask].abs().max().item(),
        "grad_hidden_error": _relative(inputs.hidden.grad, gold_hidden),
        "grad_weight_error": _relative(inputs.weight.grad, gold_weight),
        "error_rows": small.rows,
    }


def _gold(case: Case, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight = (leaf.detach().double().requires_grad_() for leaf in (inputs.hidden, inputs.weight))
    logps, _ = reference_logprobs(hidden, weight, inputs.ids, transform=logit_transform(case))
    loss = grpo_loss(logps, inputs)
    grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))
    return logps.detach(), loss.detach(), grad_hidden, grad_weight


def _relative(found: Tensor, gold: Tensor) -> float:
    return (torch.linalg.vector_norm(found.double() - gold) / torch.linalg.vector_norm(gold)).item()
