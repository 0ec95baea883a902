"""What preference, unpaired and supervised losses should be: formulas of the papers and of TRL, in float64.

Imports nothing of the package under test. Rows are (S, T): first the chosen sequences, then the rejected ones.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

SCORES = {
    "reverse_kl": lambda x, _: x,
    "forward_kl": lambda x, _: 1 - (-x).exp(),
    "js_divergence": lambda x, _: math.log(2) + logsigmoid(x),
    "alpha_divergence": lambda x, a: (((a - 1) * x).exp() - 1) / (a - 1),
}


def pair_losses(name: str, o: dict, logps: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    """(P,) of DPOTrainer's loss_type `name`, from log-probabilities (2 P, T) of a policy and a reference.

    Of a reference also (2 P,), sums over sequences that ld_alpha has weighted already.
    """
    beta, s, pairs = o.get("beta", 0.1), o.get("label_smoothing", 0.0), len(mask) // 2
    n = mask.sum(1)
    shorter, n = torch.minimum(n[:pairs], n[pairs:]).repeat(2)[:, None], n.clamp(min=1)

    def sums(x: Tensor) -> tuple[Tensor, Tensor]:
        if o.get("ld_alpha") is not None and x.dim() == 2:
            x = torch.where(mask.cumsum(1) <= shorter, x, o["ld_alpha"] * x)
        total = torch.where(mask, x, 0.0).sum(1) if x.dim() == 2 else torch.where(mask.any(1), x, 0.0)
        return (total / n if o.get("average_log_prob") else total).chunk(2)

    def logistic(margin: Tensor) -> Tensor:
        return -(1 - s) * logsigmoid(margin) - s * logsigmoid(-margin)

    policy, reference = sums(logps), sums(ref)
    c, r = (side - of_reference for side, of_reference in zip(policy, reference, strict=True))
    score, alpha = SCORES[o.get("f_divergence_type", "reverse_kl")], o.get("f_alpha_divergence_coef", 0.5)
    high, low = score(c, alpha), score(r, alpha)
    margin, mean = high - low, high / n[:pairs] - low / n[pairs:]
    z, sig = beta * margin, torch.sigmoid
    if name == "aot":
        margin = (policy[0] - policy[1]).sort().values - (reference[0] - reference[1]).sort().values
        return logistic(beta * margin)
    if name == "aot_unpaired":
        return logistic(beta * (c.sort().values - r.sort().values))
    if name == "exo_pair":
        near = sig(z) * (logsigmoid(z) - math.log(1 - s))
        return near + sig(-z) * (logsigmoid(-z) - math.log(s))
    if name == "robust":
        return (s * logsigmoid(-z) - (1 - s) * logsigmoid(z)) / (1 - 2 * s)
    if name == "discopop":
        share = sig(z / o.get("discopop_tau", 0.05))
        return -logsigmoid(z) * (1 - share) + (-z).exp() * share
    return {
        "sigmoid": lambda: logistic(z),
        "hinge": lambda: relu(1 - z),
        "ipo": lambda: (mean - 1 / (2 * beta)) ** 2,
        "sigmoid_norm": lambda: logistic(beta * mean),
        "nca_pair": lambda: -logsigmoid(beta * c) - (logsigmoid(-beta * c) + logsigmoid(-beta * r)) / 2,
        "bco_pair": lambda: -logsigmoid(beta * c) - logsigmoid(-beta * r),
        "sppo_hard": lambda: (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
        "apo_zero": lambda: 1 - sig(beta * c) + sig(beta * r),
        "apo_down": lambda: sig(beta * c) + 1 - sig(beta * (c - r)),
    }[name]()


def reference_free_losses(name: str, o: dict, logps: Tensor, mask: Tensor) -> Tensor:
    """(P,) of "cpo" and its kinds, and of "orpo"."""
    beta, s = o.get("beta", 0.1), o.get("label_smoothing", 0.0)
    kind = o.get("kind", "simpo" if name == "simpo" else "sigmoid")
    sums, n = torch.where(mask, logps, 0.0).sum(1), mask.sum(1).clamp(min=1)
    if name == "orpo" or o.get("average_log_prob") or kind in ("ipo", "simpo"):
        sums = sums / n
    if name == "orpo":
        odds = sums - torch.log(-torch.expm1(sums.clamp(max=-1e-7)))
        return -beta * logsigmoid(odds.chunk(2)[0] - odds.chunk(2)[1])
    if o.get("alphapo_alpha", 0.0):
        sums = (1 - (-o["alphapo_alpha"] * sums).exp()) / o["alphapo_alpha"]
    margin = sums.chunk(2)[0] - sums.chunk(2)[1]
    if kind == "ipo":
        return (margin - 1 / (2 * beta)) ** 2
    if kind == "hinge":
        return relu(1 - beta * margin)
    z = beta * margin - (o.get("simpo_gamma", 0.5) if kind == "simpo" else 0.0)
    return -(1 - s) * logsigmoid(z) - s * logsigmoid(-z)


def unpaired_losses(name: str, o: dict, logps: Tensor, ref: Tensor, mask: Tensor, labels: Tensor, shift) -> Tensor:
    """(S,) of "kto" with its kl, "apo_zero_unpaired", and "bco" with its delta."""
    x = torch.where(mask, logps, 0.0).sum(1) - (torch.where(mask, ref, 0.0).sum(1) if ref.dim() == 2 else ref)
    if o.get("average_log_prob"):
        x = x / mask.sum(1).clamp(min=1)
    z = o.get("beta", 0.1) * x
    sign = torch.where(labels, 1.0, -1.0)
    weight = torch.where(labels, o.get("desirable_weight", 1.0), o.get("undesirable_weight", 1.0))
    if name == "bco":
        return -weight * logsigmoid(sign * (z - shift))
    return weight * (1 - torch.sigmoid(sign * (z - (o.get("beta", 0.1) * shift if name == "kto" else 0.0))))


def supervised_losses(name: str, o: dict, logits: Tensor, targets: Tensor) -> Tensor:
    """(S, T) of logits (S, T, V) and ids that may be negative."""
    log_p = logits.log_softmax(-1)
    nll = -log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    s = o.get("label_smoothing", 0.0)
    loss, p = (1 - s) * nll - s * log_p.mean(-1), (-nll).exp()
    if name == "dft":
        loss = p.detach() * loss
    elif name == "eaft":
        known = log_p.detach()
        entropy = -(known.exp() * known).sum(-1)
        loss = (entropy / o.get("eaft_scale", 3.0)) ** o.get("eaft_alpha", 1.0) * loss
    return loss + o.get("z_loss", 0.0) * logits.logsumexp(-1) ** 2
