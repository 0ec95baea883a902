"""What the results should be: full logits and plain loops, float64. Imports nothing of the package under test."""

import torch
from torch import Tensor


def transformed(
    logits: Tensor, *, temperature: float = 1.0, softcap: float | None = None, scale: float = 1.0
) -> Tensor:
    z = scale * logits
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z / temperature


def logits_logprobs(logits: Tensor, targets: Tensor, **transform) -> tuple[Tensor, Tensor]:
    """-> log-probability of each target and entropy, in the dtype of `logits`; (..., V) and (...)."""
    log_p = transformed(logits, **transform).log_softmax(-1)
    logps = log_p.gather(-1, targets.long()[..., None]).squeeze(-1)
    p = log_p.exp()
    return logps, -torch.where(p > 0, p * log_p, 0.0).sum(-1)


def logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """-> (logps, entropy) in float64 from the full logits."""
    return logits_logprobs(linear_logits(hidden, weight, bias, temperature, softcap, scale), targets)


def linear_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
) -> Tensor:
    """-> transformed logits (..., V) in float64."""
    logits = hidden.double() @ weight.double().mT
    if bias is not None:
        logits = logits + bias.double()
    return transformed(logits, temperature=temperature, softcap=softcap, scale=scale)


def logits_extras(z: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-> log sum p^2, mean of the logits, whether the target is the first of the largest; z (..., V) transformed."""
    return (2 * z.log_softmax(-1)).logsumexp(-1), z.mean(-1), z.argmax(-1) == targets


def eager_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **transform):
    """What one writes in PyTorch without thinking: logits in the inputs' dtype, the softmax in float32."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return logits_logprobs(logits.float(), targets, **transform)


def error_budget(eager: Tensor, truth: Tensor, dtype: torch.dtype) -> float:
    """Twice the error of eager PyTorch, plus one rounding to `dtype` of the largest value."""
    truth = truth.double()
    rounding = torch.finfo(dtype).eps * truth.abs().max().item()
    return 2.0 * (eager.double() - truth).abs().max().item() + rounding


def norm_budget(eager: Tensor, truth: Tensor, dtype: torch.dtype) -> float:
    """`error_budget` in the Frobenius norm, where the largest of a few errors would be a matter of luck."""
    truth = truth.double()
    return 2.0 * (eager.double() - truth).norm().item() + torch.finfo(dtype).eps * truth.norm().item()


def norm_error(found: Tensor, truth: Tensor) -> float:
    return (found.double() - truth.double()).norm().item()


def max_error(found: Tensor, truth: Tensor) -> float:
    return (found.double() - truth.double()).abs().max().item()


def ratios(logps: Tensor, old: Tensor | None, mask: Tensor, level: str) -> list[list[Tensor | None]]:
    """Importance ratio of every token of (B, T), None at masked tokens."""
    rows, columns = logps.shape
    result: list[list[Tensor | None]] = [[None] * columns for _ in range(rows)]
    for b in range(rows):
        inside = [t for t in range(columns) if mask[b, t] != 0]
        log_ratio = {t: logps[b, t] - (logps[b, t].detach() if old is None else old[b, t]) for t in inside}
        for t in inside:
            if level == "sequence":
                result[b][t] = torch.exp(sum(log_ratio.values()) / len(inside))
            else:
                result[b][t] = torch.exp(log_ratio[t])
    return result


def token_losses(
    logps: Tensor,  # (B, T)
    advantages: Tensor,  # (B,) or (B, T)
    mask: Tensor,  # (B, T)
    *,
    old: Tensor | None = None,
    ref: Tensor | None = None,
    importance_ratio: Tensor | None = None,  # (B,), (B, 1) or (B, T)
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    delta: float | None = None,
    level: str = "token",
    beta: float = 0.0,
) -> list[list[Tensor | None]]:
    """Clipped policy loss with a k3 penalty of every token, None at masked tokens."""
    rows, columns = logps.shape
    result: list[list[Tensor | None]] = [[None] * columns for _ in range(rows)]
    for b, row in enumerate(ratios(logps, old, mask, level)):
        for t, r in enumerate(row):
            if r is None:
                continue
            a = advantages[b].item() if advantages.dim() == 1 else advantages[b, t].item()
            if r < 1 - eps_low:
                clipped = torch.full_like(r, 1 - eps_low)
            elif r > 1 + eps_high:
                clipped = torch.full_like(r, 1 + eps_high)
            else:
                clipped = r
            first = r if delta is None or r <= delta else torch.full_like(r, delta)
            loss = -(first * a if first * a <= clipped * a else clipped * a)
            if importance_ratio is not None:
                per_sequence = importance_ratio.dim() == 1 or importance_ratio.shape[1] == 1
                loss = loss * (importance_ratio[b] if per_sequence else importance_ratio[b, t]).item()
            if beta != 0.0:
                difference = ref[b, t] - logps[b, t]
                loss = loss + beta * (torch.exp(difference) - difference - 1)
            result[b][t] = loss
    return result
