"""What every result should be: full logits, plain formulas and autograd in float64. Imports nothing of the package.

Beside each value stands its budget, the largest error that is still rounding. Nothing in it is a matter of taste: it is
a few units of rounding times the size of the terms that the value is the sum of, and, for losses, what the value
changes by when the log-probabilities move within their own budget.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

import oracles

EPS = 2.0**-23
CUDA = torch.cuda.is_available()
# Of float32: sums of some hundred terms, exp, log, and the transform. On a GPU sums have up to 900 terms and may be
# made one by one, whose errors add up like a random walk: 30 halves of a rounding.
ROUNDINGS = 6 if not CUDA else 6 + 900**0.5 / 2
TRITON = CUDA  # whether the kernels are Triton's
TANH_ROUNDINGS = 2  # of 1: Triton's tanh is good to 2.4e-7, however small it is


class HeadResult(NamedTuple):
    values: dict[str, Tensor]  # by field of LogProbs, (N,)
    budgets: dict[str, Tensor]
    grads: dict[str, Tensor]  # by name of the input
    grad_budgets: dict[str, Tensor]
    dlogits: Tensor  # (N, V), by the head's output before the transform


def unit(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to a dtype."""
    return torch.finfo(dtype).eps / 2


def _least(dtype: torch.dtype) -> float:
    """Largest absolute error of rounding; float32 and bfloat16 may flush what is not normal."""
    info = torch.finfo(dtype)
    return info.smallest_normal * (info.eps if dtype == torch.float16 else 1.0)


def _rounded(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """In float64, with the digits that `dtype` keeps; the gradient passes unrounded."""
    wide = x.double()
    return wide if dtype is None else wide + (x.detach().to(dtype).double() - x.detach().double())


def listed_of(case) -> tuple[Tensor, Tensor]:
    """-> (N, V) bool: what a token's softmax is over; (N,) bool: it lists ids, but not its target."""
    targets, vocab = case.targets.reshape(-1).long().clamp(min=0), case.weight.shape[0]
    tokens = torch.arange(targets.numel(), device=targets.device)
    if case.support is None:
        return torch.ones(tokens.numel(), vocab, dtype=torch.bool, device=targets.device), tokens < 0
    sizes = case.support["offsets"].long().diff()
    listed = torch.zeros(tokens.numel(), vocab, dtype=torch.bool, device=targets.device)
    listed[torch.repeat_interleave(tokens, sizes), case.support["token_ids"].long()] = True
    listed[sizes == 0] = True
    missing = ~listed[tokens, targets] & case.live.reshape(-1)
    listed[tokens, targets] = True
    return listed, missing


class Logits:
    """Transformed logits (N, V) of float64 raw ones, and how far rounding may put what is made of them."""

    def __init__(
        self, raw: Tensor, size: Tensor, targets: Tensor, live: Tensor, transform: dict, listed: Tensor | None = None
    ) -> None:
        """raw: (N, V); size: (N, V) sums of their terms' absolute values; masked rows may hold anything finite."""
        self.listed = torch.ones_like(raw, dtype=torch.bool) if listed is None else listed
        self.raw, self.targets, self.live = raw, targets.clamp(min=0), live
        self.temperature, self.softcap, self.scale = transform["temperature"], transform["softcap"], transform["scale"]
        self.z = oracles.transformed(raw, **transform).masked_fill(~self.listed, -torch.inf)
        found = oracles.values(self.z, self.targets)
        found = found._replace(is_top1=found.is_top1.double())
        self.values = {k: v.masked_fill(~live, 0.0) for k, v in found._asdict().items()}
        with torch.no_grad():
            self.slope = torch.ones_like(raw)
            arg = torch.zeros_like(raw)
            if self.softcap is not None:
                self.slope = 1 - torch.tanh(self.scale * raw / self.softcap) ** 2
                arg = self.slope * self.scale * size / self.softcap
                arg = arg + TRITON * TANH_ROUNDINGS * (1 + self.softcap / self.temperature)
            inner = (self.scale / self.temperature * size * self.slope + self.z.abs() + arg).masked_fill(
                ~self.listed, 0
            )
            # Relative error of a row's probabilities, in units of rounding; a banned entry has none.
            # The sum of so many exponentials may be made one by one, whose errors add up like a random walk.
            self.amp = 1 + raw.shape[-1] ** 0.5 / 4 + inner.nan_to_num(posinf=0.0, nan=0.0).amax(-1)
            self.p = self.z.softmax(-1)
            self.budgets = self._budgets()

    def _budgets(self) -> dict[str, Tensor]:
        unit_row = ROUNDINGS * EPS * self.amp
        p, log_p = self.p, self.z.log_softmax(-1)
        best = self.z.topk(min(2, self.z.shape[-1]), -1).values
        near_tie = best[:, 0] - best[:, -1] <= 4 * unit_row if best.shape[-1] == 2 else torch.zeros_like(self.live)
        at = self.values
        budgets = {
            "logps": unit_row + EPS * at["logps"].abs().nan_to_num(posinf=0.0),
            "entropy": unit_row * (1 + 2 * at["entropy"]),
            "lse": unit_row + EPS * at["lse"].abs(),
            "log_sum_sq_probs": 2 * unit_row,
            # Tiles of one entry add number after number, and logits of one sign and size round alike.
            "mean_logits": unit_row + (3 + self.z.shape[-1] / 4) * EPS * self.z.abs().nan_to_num(posinf=0.0).mean(-1),
            "is_top1": near_tie.double(),
        }
        self._log_p = torch.where(p > 0, log_p, 0.0).abs()
        return {name: b.masked_fill(~self.live, 0.0) for name, b in budgets.items()}

    def gradient(
        self, g: Tensor, e: Tensor, upstream: tuple[Tensor, Tensor], compute: torch.dtype, *, ids=None, r=None, m=None,
    ):  # fmt: skip
        """-> dL/draw by autograd from upstream gradients of logps and entropy (N,), and its budget, both (N, V).

        upstream: what rounding may have done to g and e already. compute: what the gradient is rounded to. With ids
        (N, K) g is (N, K); r (N,) is the gradient of lse, m (N,) of the mean logit.
        """
        ids = self.targets[:, None] if ids is None else ids
        listed, ids = (ids >= 0) & self.live[:, None], ids.clamp(min=0)
        g, e = g.reshape(ids.shape).masked_fill(~listed, 0.0), e.masked_fill(~self.live, 0.0)
        logps = self.z.log_softmax(-1).gather(-1, ids)
        total = torch.where(g != 0, logps * g, 0.0).sum() + (self.values["entropy"] * e).sum()
        if r is not None:
            r = r.masked_fill(~self.live, 0.0)
            total = total + (self.z.logsumexp(-1) * r).sum()
        share = 0.0
        if m is not None:
            share = (m.masked_fill(~self.live, 0.0) / self.z.shape[-1])[:, None].expand_as(self.z)
            total = total + torch.where(share != 0, self.z * share, 0.0).sum()
            share = share.abs()
        (grad,) = torch.autograd.grad(total, self.raw, retain_graph=True)
        grad = grad.nan_to_num(0.0)  # a softcap's slope is 0 at a banned entry
        with torch.no_grad():
            inverse = self.scale / self.temperature
            around = self.p * (self._log_p + self.values["entropy"][:, None] + 1)
            dg, de = (d.masked_fill(~self.live, 0.0)[:, None] for d in upstream)
            at_ids, sizes = (torch.zeros_like(grad).scatter_add_(1, ids, x) for x in (g, g.abs()))
            own, both, e = g.sum(1, keepdim=True), g.abs().sum(1, keepdim=True), e.abs()[:, None]
            if r is not None:
                own, both = own - r[:, None], both + r.abs()[:, None]
            size = inverse * (sizes + both * self.p + e * around + share)
            # No entry is exacter than the largest of its row: what is rounded may be their sum, or their difference.
            budget = ROUNDINGS * EPS * (self.amp[:, None] * size + size.amax(-1, keepdim=True))
            budget = budget + _least(torch.float32)
            onehot = torch.zeros_like(grad).scatter_(-1, self.targets[:, None], 1.0)
            budget = budget + inverse * self.slope * (dg * (onehot - self.p).abs() + de * around)
            if compute != torch.float32:
                moved = inverse * self.slope * ((at_ids - own * self.p).abs() + e * around + share)
                budget = budget + 2 * unit(compute) * (grad.abs() + moved) + _least(compute) * (grad != 0)
        return grad, budget.masked_fill(~self.listed, 0.0)


def head(case, g: Tensor, e: Tensor, upstream: tuple[Tensor, Tensor] | None = None, r=None, m=None) -> HeadResult:
    """linear_logprobs for a `HeadCase`, flat over tokens.

    g, e, r, m (N,) are the gradients of logps, entropy, lse and mean_logits. With ids (N, K) logps and g are (N, K).
    """
    runs = Head(case)
    logits, live = runs.logits, runs.live
    nothing, ids = torch.zeros_like(e, dtype=torch.float64), None
    values, budgets = ({k: v.detach() for k, v in x.items()} for x in (logits.values, logits.budgets))
    unit_row = (ROUNDINGS * EPS * logits.amp).masked_fill(~live, 0.0)
    if case.ids is not None:
        ids = case.ids.flatten(0, -2).long()
        log_p, listed = logits.z.detach().log_softmax(-1), (ids >= 0) & live[:, None]
        values["logps"] = torch.where(listed, log_p.gather(-1, ids.clamp(min=0)), 0.0)
        budgets["logps"] = unit_row[:, None] + EPS * values["logps"].abs()
    given = g.double(), e.double(), upstream or (nothing, nothing), case.compute
    r, m = (None if x is None else x.double() for x in (r, m))
    dlogits, budget = logits.gradient(*given, ids=ids, r=r, m=m)
    grads, grad_budgets = runs.gradients(dlogits, budget)
    return HeadResult(values, budgets, grads, grad_budgets, dlogits.detach())


class Head:
    def __init__(self, case) -> None:
        self.case, self.live = case, case.live.reshape(-1)
        width, compute = case.hidden.shape[-1], case.compute
        self.inputs = {"hidden": case.hidden, "weight": case.weight}
        if case.bias is not None:
            self.inputs["bias"] = case.bias
        # Clean zeros in masked rows, whatever the case has there.
        self.inputs["hidden"] = case.hidden.reshape(-1, width).masked_fill(~self.live[:, None], 0.0)
        self.inputs = {k: v.detach().double().requires_grad_() for k, v in self.inputs.items()}
        h, w = (_rounded(self.inputs[k], compute) for k in ("hidden", "weight"))
        raw, size = h @ w.T, h.abs() @ w.abs().T
        if case.bias is not None:
            raw, size = raw + self.inputs["bias"], size + self.inputs["bias"].abs()
        self.h, self.w, self.raw = h.detach(), w.detach(), raw
        cut = raw.detach().requires_grad_()
        listed, self.missing = listed_of(case)
        self.logits = Logits(cut, size.detach(), case.targets.reshape(-1), self.live, case.transform, listed)

    def gradients(self, dlogits: Tensor, budget: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        names = list(self.inputs)
        found = torch.autograd.grad(self.raw, [self.inputs[n] for n in names], dlogits, allow_unused=True)
        grads = {n: torch.zeros_like(self.inputs[n]) if g is None else g for n, g in zip(names, found, strict=True)}
        budgets = {"hidden": budget @ self.w.abs(), "weight": budget.T @ self.h.abs()}
        if "bias" in grads:
            budgets["bias"] = budget.sum(0)
        # Each is a float32 sum that is rounded to its tensor's dtype at the end.
        dtypes = {"hidden": self.case.hidden.dtype, "weight": self.case.weight.dtype}
        if self.case.bias is not None:
            dtypes["bias"] = self.case.bias.dtype
        for n in names:
            budgets[n] = budgets[n] + 2 * unit(dtypes[n]) * (grads[n].abs() + budgets[n]) + _least(dtypes[n])
        return grads, budgets


# --- policy losses: everything flat, (N,), float64, 0 where masked ---


class Columns(NamedTuple):
    mask: Tensor
    advantages: Tensor
    old: Tensor | None
    ref: Tensor | None
    sampling: Tensor | None
    importance: Tensor | None
    row: Tensor  # index of the token's sequence
    rows: int
    num_sequences: float
    items: float | None

    def total(self, x: Tensor) -> Tensor:
        """Sum over each token's sequence, at each token."""
        return x.new_zeros(self.rows + 1).index_add(0, self.row, x)[self.row]

    def mean(self, x: Tensor) -> Tensor:
        return self.total(x) / self.total(self.mask.double()).clamp(min=1)


def _bounded(x, low, high):
    """x in [low, high], with a gradient at the bounds; a clamp's is 0 there since PyTorch 2.14."""
    return torch.where(x < low, low, torch.where(x > high, high, x))


def _clipped(loss: Tensor, ratio: Tensor, A: Tensor, low: float, high: float) -> tuple:
    return loss, ratio, (ratio < low) & (A < 0), (ratio > high) & (A > 0), (ratio < low) | (ratio > high)


def objective(name: str, o: dict, logp: Tensor, c: Columns) -> tuple:
    """-> loss per token, ratio, clipped under, clipped over, outside (None where the objective does not clip)."""
    old, A = (logp.detach() if c.old is None else c.old), c.advantages
    d = logp - old
    r = d.exp()
    if name == "PPOClip":
        level = o.get("importance_sampling_level", "token")
        if level != "token":
            r = c.mean(d).exp()
        if level == "sequence_token":
            r = r.detach() * (logp - logp.detach()).exp()
        if o.get("mean_advantages"):
            A = c.mean(A)
        low, high = 1 - o.get("epsilon_low", 0.2), 1 + o.get("epsilon_high", 0.2)
        first = r if o.get("delta") is None else _bounded(r, -math.inf, o["delta"])
        loss = -torch.minimum(first * A, _bounded(r, low, high) * A)
        if o.get("dual_clip") is not None:
            loss = torch.where(A < 0, torch.minimum(loss, -o["dual_clip"] * A), loss)
        return _clipped(loss, r, A, low, high)
    if name == "CISPO":
        low, high = o.get("ratio_min", 0.0), o.get("epsilon_high", 0.2)
        return _clipped(-r.detach().clamp(low, high) * A * logp, r, A, low, high)
    if name == "SAPO":
        t = torch.where(A > 0, o.get("sapo_temperature_pos", 1.0), o.get("sapo_temperature_neg", 1.05))
        return -torch.sigmoid(t * (r - 1)) * 4 / t * A, r, None, None, None
    if name == "VESPO":
        log_w = c.total(torch.where(c.mask, d.detach().clamp(-20, 20), 0.0))
        if c.importance is not None:
            log_w = log_w + c.total(torch.where(c.mask, c.importance.log(), 0.0))
        log_w = log_w.clamp(math.log(1e-8), 20)
        k = torch.where(A >= 0, o.get("vespo_k_pos", 2.0), o.get("vespo_k_neg", 3.0))
        rate = torch.where(A >= 0, o.get("vespo_lambda_pos", 3.0), o.get("vespo_lambda_neg", 2.0))
        return -(rate + k * log_w - rate * log_w.exp()).exp() * A * logp, r, None, None, None
    if name == "GMPO":
        low, high = o.get("epsilon_low", 0.4), o.get("epsilon_high", 0.4)
        clipped = torch.where(A < 0, d.clamp(min=-low), torch.where(A > 0, d.clamp(max=high), d))
        bounds, weight = (math.exp(-low), math.exp(high)), 1.0
        if o.get("mean_importance_ratio") and c.importance is not None:
            weight = c.mean(torch.where(c.mask, c.importance.clamp(min=1e-10).log(), 0.0)).exp()
        return _clipped(-c.mean(clipped).exp() * weight * A, r, A, *bounds)
    if name in ("DPPO", "DPPOKL"):
        p, q = logp.detach().exp(), old.exp()
        up = down = p - q
        if name == "DPPOKL":
            rest, old_rest = ((1 - x).clamp(min=0.0) + 1e-8 for x in (p, q))
            divergence = q * (old - logp.detach()) + (old_rest - 1e-8) * (old_rest / rest).log()
            up, down = torch.where(p > q, divergence, 0.0), torch.where(p < q, -divergence, 0.0)
        high, low = up > o.get("divergence_high", 0.2), down < -o.get("divergence_low", 0.2)
        loss = -r.detach().clamp(max=o.get("ratio_cap", 20.0)) * A * logp
        dropped = torch.where(A > 0, high, low)
        return torch.where(dropped, 0.0, loss), r, low & (A < 0), high & (A > 0), low | high
    if name in ("IPO", "IcePop"):
        x, low, high = logp.detach().exp() - old.exp(), -o.get("ipo_threshold", 0.3), o.get("ipo_threshold", 0.3)
        if name == "IcePop":
            x, low, high = r.detach(), o.get("ratio_min", 0.2), o.get("ratio_max", 5.0)
        return (torch.where((x < low) | (x > high), 0.0, -r * A), r, *_clipped(r, x, A, low, high)[2:])
    assert name == "Reinforce"
    return -A * logp, r, None, None, None


def ranks_undecided(case, entropy: Tensor, move: Tensor) -> bool:
    """Whether rounding, which moves an entropy by up to `move`, decides which tokens have the highest."""
    mask = case.columns().mask
    known, move = entropy.detach()[mask], move[mask]
    for name, value in case.corrections:
        if name == "TopEntropyMask" and known.numel():
            kept = known >= known.quantile(1 - value)
            dropped = (known + move)[~kept]
            if dropped.numel() and bool((known - move)[kept].min() <= dropped.max()):
                return True
    return False


def weights(name: str | None, o: dict, c: Columns) -> Tensor:
    m = c.mask.double()
    if name in (None, "TokenSum"):
        return m
    if name == "SequenceMean":
        return m / (c.total(m).clamp(min=1) * max(c.num_sequences, 1))
    if name == "SequenceSum":
        return m / max(c.num_sequences, 1)
    if name == "FixedLengthMean":
        return m / (max(c.num_sequences, 1) * o["max_completion_length"])
    if name == "GlobalTokenMean" and c.items is not None:
        return m * o.get("world_size", 1) / max(c.items, 1)
    assert name in ("GlobalTokenMean", "TokenMean")
    return m / m.sum().clamp(min=1)


def penalty(estimator: str, logp: Tensor, ref: Tensor) -> Tensor:
    d = ref - logp
    return {"k1": -d, "k2": d * d / 2, "k3": d.exp() - d - 1}[estimator]


def policy(case, logps: Tensor, entropy: Tensor) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """A `PolicyCase` at clean log-probabilities and entropies (N,) -> results by name, and the terms per token of
    which the loss is the sum: of the policy, of the reference, and of the entropy."""
    c = case.columns()
    sampler = case.sampler
    if sampler is not None:
        gap = (c.old - c.sampling).nan_to_num(nan=0.0).masked_fill(~c.mask, 0.0)
        ratio = (gap if sampler["level"] == "token" else c.total(gap)).exp()
        low, high = sampler["ratio_min"] or 0.0, sampler["ratio_max"] or torch.inf
        inside = (ratio >= low) & (ratio <= high)
        c = c._replace(importance=ratio.clamp(low, high) if sampler["mode"] == "truncate" else ratio * inside)
    logp = logps.masked_fill(~c.mask, 0.0)
    loss, ratio, low, high, outside = objective(case.objective, case.objective_options, logp, c)
    counted, factor = c.mask, torch.ones_like(logp)
    for name, value in case.corrections:
        if name == "OffPolicySequenceMask":
            sampling = c.sampling if c.sampling is not None else c.old
            drift = torch.zeros_like(logp) if sampling is None else (sampling - logp.detach()).nan_to_num(nan=0.0)
            drift = c.mean(drift.masked_fill(~c.mask, 0.0))
            factor = factor * ((c.advantages >= 0) | (drift <= value))
        else:
            known = entropy.detach()[c.mask]
            bound = known.quantile(1 - value) if known.numel() else 0.0
            counted = counted & (entropy.detach() >= bound)
            factor = factor * counted
    in_objective = case.objective == "VESPO" or case.objective_options.get("mean_importance_ratio")
    if c.importance is not None and not in_objective:
        factor = factor * c.importance
    w = weights(case.reduction, case.reduction_options, c)
    kl = None
    if case.beta != 0.0:
        kl = penalty(case.estimator, logp, c.ref) * (ratio if case.weighted else 1.0)
        kl = torch.where(c.mask, kl, 0.0)
    of_policy = torch.where(c.mask, loss * factor, 0.0) * w
    of_kl = torch.zeros_like(of_policy) if kl is None else case.beta * kl * w
    bonus = torch.where(counted, entropy, 0.0) * (-case.entropy_coef / max(int(counted.sum()), 1))
    found = {"per_token": of_policy + of_kl, "loss": (of_policy + of_kl + bonus).sum()}
    found |= metrics(case, c, logp, entropy, kl, ratio, low, high, outside)
    # A mean of advantages is no exacter than that of their sizes.
    size = (
        torch.maximum(c.advantages.abs(), c.mean(c.advantages.abs()))
        * ratio
        * (1.0 if c.importance is None else c.importance.abs())
    )
    if kl is not None:
        size = size + case.beta * (1 + (c.ref - logp).exp()) * (ratio if case.weighted else 1.0)
    found["size dlogps"] = torch.where(c.mask, size * w, 0.0)
    if kl is not None:
        found["kl"] = kl
    return found, (of_policy, of_kl, bonus)


def metrics(case, c: Columns, logp, entropy, kl, ratio, low, high, outside) -> dict[str, Tensor]:
    found, n = {}, max(int(c.mask.sum()), 1)
    if kl is not None:
        found["metric kl_ref"] = kl.sum() / n
    if low is not None:
        for name, side in (("low", low), ("high", high), ("ratio", low | high)):
            found[f"metric clip_{name}"] = (side & c.mask).sum().double() / n
    if case.metrics in ("basic", "with_entropy"):
        w = weights("SequenceMean", {}, c)
        old = logp if c.old is None else c.old
        r = torch.where(c.mask, (logp - old).exp(), 0.0)
        mean_d = c.mean(torch.where(c.mask, logp - old, 0.0))
        R, share = mean_d.exp(), c.mask / c.total(c.mask.double()).clamp(min=1)
        sums = {
            "new_logprobs": logp, "old_logprobs": old, "ratio_new_old": r, "kl_new_old": r - (logp - old) - 1,
            "advantage": c.advantages, "sequence_ratio_new_old": R, "sequence_kl_new_old": R - mean_d - 1,
        }  # fmt: skip
        if outside is not None:
            sums["clipped_ratio_fraction"] = outside.double()
        if case.metrics == "with_entropy":
            sums["entropy"] = entropy
        found |= {f"metric {k}": torch.where(c.mask, v, 0.0).mul(w).sum() for k, v in sums.items()}
        found |= {f"size metric {k}": torch.where(c.mask, v.abs() + 1, 0.0).mul(w).sum() for k, v in sums.items()}
        found |= {
            "metric ratio_new_old_sum": r.sum(), "metric ratio_new_old_squared_sum": r.square().sum(),
            "metric num_tokens": c.mask.sum().double(),
            "metric sequence_ratio_new_old_sum": (R * share).sum(),
            "metric sequence_ratio_new_old_squared_sum": (R.square() * share).sum(),
            "metric num_sequences": share.sum(),
            "metric max_advantage": max(c.advantages[c.mask].tolist(), default=-torch.inf) + 0 * logp.sum(),
            "metric min_advantage": min(c.advantages[c.mask].tolist(), default=torch.inf) + 0 * logp.sum(),
        }  # fmt: skip
    return {} if case.metrics == "none" else {k: v.detach() for k, v in found.items()}


class PolicyResult(NamedTuple):
    values: dict[str, Tensor]  # loss, per_token, kl, metrics, and "dlogps", "dentropy": the gradients of the loss
    budgets: dict[str, Tensor]


def policy_result(case, logps: Tensor, entropy: Tensor, moves: tuple[Tensor, Tensor], upstream=None) -> PolicyResult:
    """moves: how far rounding may have moved logps and entropy; upstream: of the unreduced loss, (N,)."""

    def at(logps: Tensor, entropy: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        logps, entropy = logps.detach().requires_grad_(), entropy.detach().requires_grad_()
        found, terms = policy(case, logps, entropy)
        upper = torch.ones_like(logps) if upstream is None else upstream.double()
        parts = [
            [torch.zeros_like(x) if g is None else g for x, g in zip((logps, entropy), grads, strict=True)]
            for grads in (
                torch.autograd.grad((t * upper).sum(), (logps, entropy), retain_graph=True, allow_unused=True)
                if t.requires_grad
                else (None, None)
                for t in terms
            )
        ]
        found["dlogps"], found["dentropy"] = (sum(p[i] for p in parts) for i in range(2))
        size = {
            "dlogps": sum(p[0].abs() for p in parts) + found["size dlogps"] * upper.abs(),
            "dentropy": found["dentropy"].abs(),
        }
        size["per_token"] = sum(t.abs() for t in terms[:2])
        size["loss"] = sum(t.abs().sum() for t in terms)
        return {k: v.detach() for k, v in found.items()}, {k: v.detach() for k, v in size.items()}

    found, size = at(logps, entropy)
    generator = torch.Generator().manual_seed(0)
    signs = (torch.randint(0, 2, logps.shape, generator=generator).double() * 2 - 1).to(logps.device)
    moved = [at(logps + s * moves[0], entropy + s * moves[1])[0] for s in (1.0, -1.0, signs, -signs)]
    budgets = {}
    for name, value in found.items():
        change = torch.stack([(other[name] - value).nan_to_num(0.0).abs() for other in moved]).amax(0)
        largest = size.get(name, found.get(f"size {name}", value.abs())).nan_to_num(0.0, posinf=0.0)
        budgets[name] = 2 * change + 2 * ROUNDINGS * EPS * largest + _least(torch.float32)
    return PolicyResult(found, budgets)
