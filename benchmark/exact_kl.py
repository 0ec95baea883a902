"""A policy loss with the exact KL to a reference, beside the same loss with k3: rows of the divergence benchmarks."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmark.errors import relative
from benchmark.memory import PeakMemory
from benchmark.pairs import GOLD_TOKENS, Heads, gradients_of, log_probs, value_and_slopes
from benchmark.table import Columns, number
from benchmark.timing import measure_ms
from liger_rl import FusedLinearGRPOLoss, ReferenceHead

BETA = 0.04
# (estimator, passes). With k3 the reference's log-probabilities are a call of their own.
WAYS = [(estimator, passes) for passes in ("two", "one") for estimator in ("k3", "exact")]


class Batch(NamedTuple):
    """Every token counts, and is drawn from the policy."""

    heads: Heads  # policy and reference
    ids: Tensor  # (N,)
    advantages: Tensor  # (N,)
    mask: Tensor  # (N,) bool

    @classmethod
    def of(cls, heads: Heads) -> "Batch":
        device = heads.hidden.device
        generator = torch.Generator(device).manual_seed(2)
        parts = torch.arange(heads.hidden.shape[0], device=device).split(GOLD_TOKENS)
        with torch.no_grad():
            drawn = [torch.multinomial(log_probs(heads, rows)[0].exp(), 1, generator=generator) for rows in parts]
        ids = torch.cat(drawn)[:, 0]
        advantages = torch.randn(ids.shape, generator=generator, device=device)
        return cls(heads, ids, advantages, torch.ones_like(ids, dtype=torch.bool))


def penalised(loss: FusedLinearGRPOLoss, batch: Batch) -> Any:
    """-> the loss and its metrics."""
    hidden, weight, ref_hidden, ref_weight = batch.heads
    if loss.terms.kl.exact:
        reference = ReferenceHead(hidden=ref_hidden, weight=ref_weight)
        return loss(hidden, weight, *batch[1:], reference=reference)
    ref = loss.reference_logps(ref_hidden, ref_weight, batch.ids, batch.mask)
    return loss(hidden, weight, *batch[1:], ref_per_token_logps=ref)


@torch.no_grad()
def in_float64(estimator: str, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """-> mean KL, gradient of hidden, and of some of the weight's rows."""
    kls, grads_hidden, grad_weight = [], [], torch.zeros((), dtype=torch.float64, device=batch.ids.device)
    for rows in torch.arange(batch.ids.numel(), device=batch.ids.device).split(GOLD_TOKENS):
        log_p, log_q = log_probs(batch.heads, rows)
        kl, slopes = value_and_slopes(log_p, log_q, "reverse_kl")
        ids = batch.ids[rows, None]
        factors = -batch.advantages[rows, None].double()
        if estimator == "k3":
            ratio = (log_q - log_p).gather(1, ids)
            kl, factors, slopes = (ratio.exp() - ratio - 1.0)[:, 0], factors + BETA * (1.0 - ratio.exp()), None
        of_tokens = -factors * log_p.exp() if slopes is None else BETA * slopes - factors * log_p.exp()
        of_tokens.scatter_add_(1, ids, factors)
        grad_hidden, of_weight = gradients_of(of_tokens / batch.ids.numel(), batch.heads, rows)
        kls.append(kl)
        grads_hidden.append(grad_hidden)
        grad_weight = grad_weight + of_weight
    return torch.cat(kls).mean(), torch.cat(grads_hidden), grad_weight


def rows_of(heads: Heads, device: str) -> Iterator[dict[str, Any]]:
    heads = heads._replace(hidden=heads.hidden.detach().requires_grad_(), weight=heads.weight.detach().requires_grad_())
    batch, floors = Batch.of(heads), {}
    gold = {estimator: in_float64(estimator, batch) for estimator in ("k3", "exact")}
    for estimator, passes in WAYS:
        kl, grad_hidden, grad_weight = gold[estimator]

        loss = FusedLinearGRPOLoss("bnpo", beta=BETA, kl_estimator=estimator, passes=passes)

        def step(loss: FusedLinearGRPOLoss) -> tuple[Tensor, tuple[Tensor, ...]]:
            found = penalised(loss, batch)
            return found.metrics["kl_ref"].value, torch.autograd.grad(found.loss, heads[:2])

        one = partial(step, loss)
        with PeakMemory(device) as memory:
            value, grads = one()
        errors = {
            "kl_error": relative(value[None, None], kl[None, None]),
            "grad_hidden_error": relative(grads[0], grad_hidden),
            "grad_weight_error": relative(grads[1][: grad_weight.shape[0]], grad_weight),
        }
        extra = (memory.peak_bytes - sum(part.nbytes for part in grads)) / 2**20
        del grads
        step_ms = measure_ms(one, device).median_ms
        floor = floors.setdefault(passes, step_ms)
        yield {
            "status": "ok", "reason": None, "estimator": estimator, "passes": passes, "kl": kl.item(),
            "step_ms": step_ms, "x_k3": step_ms / floor, "peak_extra_mib": extra, **errors,
        }  # fmt: skip


COLUMNS: Columns = {
    "forward + backward ms": number("step_ms", ".1f"),
    "x k3": number("x_k3", ".2f"),
    "extra MiB": number("peak_extra_mib", ",.0f"),
    "KL error": number("kl_error", ".1e"),
    "dH error": number("grad_hidden_error", ".1e"),
    "dW error": number("grad_weight_error", ".1e"),
}


def label(row: dict[str, Any]) -> str:
    return f"a loss with {row['estimator']}, {'one pass' if row['passes'] == 'one' else 'two passes'}"
