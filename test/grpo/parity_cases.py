"""What the parity tests share: cases of options, log-probabilities for both libraries, and our loss of them."""

import math
from dataclasses import dataclass, fields, replace
from itertools import combinations, product
from types import SimpleNamespace

import torch

from liger_rl import OffPolicySequenceMask, PolicyBatch, TopEntropyMask, ppo_loss_fn
from liger_rl.losses.presets import build_loss

LENGTHS = torch.tensor([9, 4, 7, 1, 9, 5, 0, 8, 6, 2, 9, 3])  # one token, and none
BATCH, LENGTH = len(LENGTHS), 9
ITEMS = 97.0  # tokens of the whole step: more than LENGTHS has
CLIPPING = ("grpo", "bnpo", "dapo", "dr_grpo", "luspo")
SAPO = {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.6}
VESPO = {"vespo_k_pos": 1.7, "vespo_lambda_pos": 2.2, "vespo_k_neg": 2.6, "vespo_lambda_neg": 1.4}
CISPO_HIGH, BETA, THRESHOLD, QUANTILE, ENTROPY_COEF, MAX_LENGTH = 1.3, 0.13, 0.02, 0.4, 0.07, 11


@dataclass(frozen=True)
class Case:
    """One combination of options; the defaults are what each option is when it is off."""

    loss_type: str
    level: str = "token"
    kl: str = "none"
    delta: bool = False
    advantages: str = "(B,)"
    old: bool = True
    ratio: str = "none"
    off_policy: str = "none"
    top_entropy: bool = False
    entropy_bonus: bool = False

    def __str__(self):
        off = Case(self.loss_type)
        chosen = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)[1:]
                  if getattr(self, f.name) != getattr(off, f.name)]  # fmt: skip
        return ",".join([self.loss_type, *chosen])

    @property
    def bounds(self):
        """epsilon_low, epsilon_high, delta: a mean over a sequence moves less."""
        if self.loss_type == "gmpo":
            return 0.25, 0.35, None
        low, high, delta = (0.2, 0.28, 1.5) if self.level == "token" else (0.04, 0.06, 1.1)
        return low, high, delta if self.delta else None

    @property
    def options(self):
        """Of the objective and the reduction, by the names that all libraries use."""
        low, high, delta = self.bounds
        if self.loss_type in CLIPPING:
            options = {
                "epsilon_low": low,
                "epsilon_high": high,
                "delta": delta,
                "importance_sampling_level": self.level,
            }
            return options | ({"max_completion_length": MAX_LENGTH} if self.loss_type == "dr_grpo" else {})
        others = {"cispo": {"epsilon_high": CISPO_HIGH}, "sapo": SAPO, "vespo": VESPO}
        return others.get(self.loss_type, {"epsilon_low": low, "epsilon_high": high})

    @property
    def beta(self):
        return 0.0 if self.kl == "none" else BETA

    @property
    def meaningful(self):
        """Without old log-probabilities the ratio is 1: no clipping, no drift, one level."""
        return self.old or (self.level == "token" and not self.delta and self.off_policy != "old")


def pairwise(options):
    """A few of the meaningful combinations, in which any two values that can meet do."""
    cases = [Case(**dict(zip(options, values, strict=True))) for values in product(*options.values())]
    uncovered = {
        case: set(combinations([(n, getattr(case, n)) for n in options], 2)) for case in cases if case.meaningful
    }
    missing = set().union(*uncovered.values())
    chosen = []
    while missing:
        chosen.append(max(uncovered, key=lambda case: len(uncovered[case] & missing)))
        missing -= uncovered[chosen[-1]]
    return chosen


def columns(seed=7, lengths=LENGTHS):
    """What both are given: float32, ratios on either side of every bound, nothing near a factor of 0 or 1."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    logps = -normal(BATCH, LENGTH).abs() - 0.1
    mask = torch.arange(LENGTH) < lengths[:, None]
    sampling = logps + 0.4 * normal(BATCH, LENGTH)
    sampling[0, 2] = math.nan  # the engine reported none
    ratio = 0.3 + 1.7 * torch.rand(BATCH, LENGTH, generator=g)
    return SimpleNamespace(
        logps=logps,
        entropies=0.2 + 2 * torch.rand(BATCH, LENGTH, generator=g),
        mask=mask,
        advantages={"(B,)": normal(BATCH), "(B, T)": normal(BATCH, LENGTH)},
        old=logps + 0.4 * normal(BATCH, LENGTH),
        ref=logps + 0.4 * normal(BATCH, LENGTH),
        sampling=sampling,
        # TRL makes them from masked differences, so they are 1 under the mask.
        ratio={"none": None, "(B, T)": torch.where(mask, ratio, 1.0), "(B, 1)": ratio[:, :1]},
    )


def leaves(data):
    return data.logps.clone().requires_grad_(), data.entropies.clone().requires_grad_()


def gradients(loss, *inputs):
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, grads, strict=True)]


def ours(case, data, *, items=ITEMS, sampler_correction=None, scale=1.0):
    """-> loss, gradients with respect to log-probabilities and entropies, metrics."""
    penalties = {"beta": case.beta, "importance_weighted": case.kl == "importance_weighted"}
    penalties["entropy_coef"] = ENTROPY_COEF if case.entropy_bonus else 0.0
    parts = build_loss(case.loss_type, case.options | penalties)
    corrections = [OffPolicySequenceMask(threshold=THRESHOLD)] if case.off_policy != "none" else []
    corrections += [TopEntropyMask(top_entropy_quantile=QUANTILE)] if case.top_entropy else []
    batch = PolicyBatch(
        advantages=data.advantages[case.advantages],
        completion_mask=data.mask,
        old_per_token_logps=data.old if case.old else None,
        ref_per_token_logps=data.ref if case.kl != "none" else None,
        sampling_per_token_logps=data.sampling if case.off_policy == "sampling" or sampler_correction else None,
        importance_ratio=data.ratio[case.ratio],
        num_items_in_batch=items,
    )
    logps, entropies = leaves(data)
    found = ppo_loss_fn(
        logps, batch, parts.objective, parts.reduction, entropy=entropies, kl=parts.kl,
        entropy_bonus=parts.entropy_bonus, sampler_correction=sampler_correction, corrections=corrections,
    )  # fmt: skip
    loss = found.loss / scale
    return loss.detach(), *gradients(loss, logps, entropies), found.metrics


def assert_same(found, expected):
    """Loss to 1e-5 of itself; each gradient to 1e-5 of itself, with a floor of 1e-6 of the largest."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    for mine, truth in zip(found[1:3], expected[1:3], strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-6 * truth.abs().max().item())


def differ(found, other):
    return any((mine - theirs).abs().max() > 1e-3 * mine.abs().max() for mine, theirs in
               zip(found[1:3], other[1:3], strict=True))  # fmt: skip


def assert_each_option_has_a_part(case, data, found):
    for option in fields(Case)[1:]:
        off = replace(case, **{option.name: option.default if option.name != "old" else not case.old})
        if off != case and off.meaningful:
            assert differ(found, ours(off, data)), option.name
    if case.loss_type in (*CLIPPING, "gmpo") and case.old:
        assert 0 < found[3]["clip_low"].item() < 0.5
        assert 0 < found[3]["clip_high"].item() < 0.5
