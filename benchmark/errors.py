"""Distance of a variant from float64, on the same rounded inputs."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmark.cases import LOGPS_AND_ENTROPY, STEP, Case
from benchmark.gold import Gold
from benchmark.inputs import Inputs
from benchmark.peers.peer import Head

ROWS = 8192  # of a gradient that are compared at a time


def measure_errors(
    variant: Head, compute: Callable[[], Tensor], case: Case, inputs: Inputs, gold: Gold
) -> dict[str, float | None]:
    """-> loss, largest log-probability and entropy errors in nats, gradients' relative Frobenius errors.

    `compute` is the variant's loss of these inputs.
    """
    errors: dict[str, float | None] = {"error_rows": case.rows}
    if variant.per_token:
        wanted = case.task == LOGPS_AND_ENTROPY
        with torch.no_grad():
            values = variant.values(case, inputs, entropy=wanted)
        errors["logp_max_error"] = _largest(values.logps, gold.logps, inputs.mask)
        if wanted and values.entropy is not None:
            errors["entropy_max_error"] = _largest(values.entropy, gold.entropy, inputs.mask)
        del values
    if case.task == STEP:
        inputs.hidden.grad = inputs.weight.grad = None
        loss = compute()
        loss.backward()
        errors["loss_error"] = abs(loss.item() - gold.loss.item())
        errors["grad_hidden_error"] = relative(inputs.hidden.grad, gold.grad_hidden)
        errors["grad_weight_error"] = relative(inputs.weight.grad, gold.grad_weight)
    return errors


def _largest(found: Tensor, gold: Tensor, mask: Tensor) -> float:
    return (found - gold)[mask].abs().max().item()


def relative(found: Tensor | None, gold: Tensor | None) -> float | None:
    """Frobenius; None if the case has no such gradient, 1 if a variant leaves it out."""
    if gold is None:
        return None
    if found is None:
        return 1.0
    found, gold = found.flatten(0, -2), gold.flatten(0, -2)
    # A few rows at a time: a float64 copy of the weight's gradient would be the largest tensor there is.
    parts = zip(found.split(ROWS), gold.split(ROWS), strict=True)
    missed = torch.stack([torch.stack([(f.double() - g).square().sum(), g.square().sum()]) for f, g in parts]).sum(0)
    return torch.sqrt(missed[0] / missed[1]).item()
