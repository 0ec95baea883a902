"""ppo_loss_fn: columns of any shape, layouts, parts of one's own, bad input. Its values are the fuzzer's."""

import ast
import functools
import importlib.util
import inspect
import math
import random
import re
import traceback
import warnings
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Annotated, get_args, get_origin

import pytest
import torch

import liger_rl.losses
from head_calls import Products
from liger_rl import (
    FusedLinearCrossEntropyLoss,
    FusedLinearGRPOLoss,
    FusedLinearPreferenceLoss,
    FusedLinearUnpairedLoss,
    linear_divergence,
    linear_logprobs,
    loss_steps,
    patch_trl,
    ppo_loss_fn,
    topk_divergence,
)
from liger_rl.fused_linear import grpo_loss_from_logits
from liger_rl.head import LogitTransform, logits_logprobs
from liger_rl.head.head_options import HeadOptions
from liger_rl.hints import BOTH_BOUNDS, EXPLANATIONS, NAMES, REDUCTIONS, hint
from liger_rl.losses import (
    CISPO,
    CPO,
    DPO,
    ORPO,
    PRESETS,
    SAPO,
    VESPO,
    EntropyBonus,
    GlobalTokenMean,
    KLPenalty,
    OffPolicySequenceMask,
    PolicyBatch,
    PPOClip,
    SamplerCorrection,
    Segments,
    SequenceMean,
    TokenLoss,
    TokenMean,
    TopEntropyMask,
)
from liger_rl.losses.presets import FIELDS, build_loss

LENGTHS = [6, 1, 4, 0, 5]  # one full sequence, one fully masked
OTHERS = ("old_per_token_logps", "ref_per_token_logps", "importance_ratio")


def columns(batch=5, length=6, *, noise=0.3, seed=0):
    """-> logps with gradient, and a PolicyBatch's columns, float64; ratios cross the usual bounds."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    logps = -normal(batch, length).abs() - 0.1
    return logps.requires_grad_(), {
        "advantages": normal(batch),
        "mask": torch.arange(length) < torch.tensor((LENGTHS * batch)[:batch])[:, None],
        "old_per_token_logps": logps.detach() + noise * normal(batch, length),
        "ref_per_token_logps": logps.detach() + noise * normal(batch, length),
        "importance_ratio": torch.exp(0.2 * normal(batch, length)),
    }


def solve(logps, parts, objective=None, reduction=TokenMean(), **options):  # noqa: B008 - frozen
    return ppo_loss_fn(logps, PolicyBatch(**parts), objective or PPOClip(), reduction, **options)


@pytest.mark.parametrize("sampler", [None, SamplerCorrection()])
def test_other_columns_get_no_gradient(sampler):
    logps, parts = columns()
    if sampler is not None:
        del parts["importance_ratio"]
    parts["sampling_per_token_logps"] = parts["old_per_token_logps"] - 0.1
    parts["num_items_in_batch"] = torch.tensor(16.0)
    leaves = {name: value.requires_grad_() for name, value in parts.items() if name != "mask"}
    found = solve(
        logps, parts, None, GlobalTokenMean(), kl=KLPenalty(beta=0.1), sampler_correction=sampler,
        corrections=[OffPolicySequenceMask(threshold=9.0)], metrics="basic",
    )  # fmt: skip
    found.loss.backward()
    assert logps.grad.any()
    assert {name: leaf.grad for name, leaf in leaves.items()} == dict.fromkeys(leaves)
    assert not any(metric.total.requires_grad for metric in found.metrics.values())


@pytest.mark.parametrize(("level", "objective"), [("token", PPOClip()), ("token", VESPO()), ("sequence", PPOClip())])
def test_a_sampler_correction_without_old_log_probabilities_takes_the_current_ones(level, objective):
    logps, parts = columns()
    parts["importance_ratio"], sampling = None, parts.pop("old_per_token_logps")
    parts["sampling_per_token_logps"] = sampling.masked_fill(torch.arange(6) == 2, math.nan)
    masked = logps.detach().masked_fill(~parts["mask"], math.nan).requires_grad_()
    results = []
    for values, old in ((masked, None), (logps, logps.detach())):
        found = solve(
            values, parts | {"old_per_token_logps": old}, objective, SequenceMean(), metrics="basic",
            sampler_correction=SamplerCorrection(level=level, mode="truncate", ratio_max=2.0),
        )  # fmt: skip
        found.loss.backward()
        results.append((found.loss.detach(), values.grad, {name: x.value for name, x in found.metrics.items()}))
    assert results[0][1].any()
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_losses_are_at_least_float32(dtype):
    logps, parts = columns()
    low = {name: v.to(dtype) if v.is_floating_point() else v for name, v in parts.items()}
    leaf = logps.detach().to(dtype).requires_grad_()
    found = solve(leaf, low, None, SequenceMean()).loss
    rounded = {name: v.double() if v.is_floating_point() else v for name, v in low.items()}
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(solve(leaf.double(), rounded, None, SequenceMean()).loss.item(), rel=1e-5)


def test_an_objective_of_your_own_sees_clean_columns():
    logps, parts = columns()
    hole = ~parts["mask"]
    parts["old_per_token_logps"] = parts["old_per_token_logps"].masked_fill(hole, math.nan)
    seen = {}

    def reinforce(logps, batch):
        seen.update(logps=logps, old=batch.old_per_token_logps, advantages=batch.advantages, mask=batch.mask)
        return TokenLoss(-batch.advantages * logps)

    found = solve(logps, parts, reinforce)
    weights = parts["importance_ratio"] * parts["mask"] / parts["mask"].sum()
    torch.testing.assert_close(found.loss, -(weights * parts["advantages"][:, None] * logps).sum())
    assert found.metrics == {}
    for name in ("logps", "old", "advantages"):
        assert seen[name].shape == (5, 6)
        assert (seen[name][hole] == 0).all()
    assert torch.equal(seen["mask"], parts["mask"])


def test_a_reduction_of_your_own():
    logps, parts = columns()
    weights = torch.rand(5, 6, dtype=torch.float64)
    found = solve(logps, parts, None, lambda batch: weights).loss
    torch.testing.assert_close(found, (solve(logps, parts, None, None).loss * weights).sum())


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "error", "value"),
    [
        ("advantages", ValueError, torch.zeros(4)),
        ("advantages", ValueError, torch.zeros(5, 5)),
        ("advantages", ValueError, torch.zeros(5, device="meta")),
        ("advantages", TypeError, 1.0),
        ("advantages", TypeError, None),
        ("mask", ValueError, torch.ones(5)),
        ("mask", TypeError, [1]),
        ("old_per_token_logps", ValueError, torch.zeros(5, 7)),
        ("old_per_token_logps", TypeError, torch.zeros(5, 6, dtype=torch.complex64)),
        ("ref_per_token_logps", ValueError, torch.zeros(5)),
        ("ref_per_token_logps", ValueError, None),
        ("importance_ratio", ValueError, torch.zeros(6)),
        ("importance_ratio", ValueError, torch.zeros(1, 6)),
        *(
            (name, TypeError, torch.ones(5, 6).to(dtype))
            for name in ("advantages", *OTHERS)
            for dtype in (torch.bool, torch.uint16, torch.float8_e4m3fn)
        ),
        *(
            (name, TypeError, torch.ones(5, 6).to_sparse(layout=layout))
            for name in ("mask", *OTHERS)
            for layout in (torch.sparse_coo, torch.sparse_csr)
        ),
        *(
            (name, error, value)
            for name in ("num_sequences", "num_items_in_batch")
            for error, values in (
                (ValueError, (0, -3, 0.5, math.nan, math.inf, -math.inf, 10**400)),
                (ValueError, (torch.tensor([7, 7]), torch.tensor(7, device="meta"))),
                (TypeError, (True, "7", torch.tensor(True), torch.tensor(1j))),
            )
            for value in values
        ),
    ],
)
def test_bad_columns_are_named(name, error, value):
    logps, parts = columns()
    with pytest.raises(error, match=rf"\b{name}\b"):
        solve(logps, {**parts, name: value}, kl=KLPenalty(beta=0.1))


@pytest.mark.parametrize("value", [0.5, -1.0, 2.0, math.nan, math.inf, -1])
def test_mask_values_other_than_0_and_1_are_refused(value):
    logps, parts = columns()
    mask = parts["mask"].to(torch.float32 if isinstance(value, float) else torch.int64)
    mask[2, 1] = value
    with pytest.raises(ValueError, match="mask must be 0 or 1"):
        solve(logps, {**parts, "mask": mask})


def test_a_tensor_divisor_under_1_counts_as_1():
    logps, parts = columns()
    zero, one = (
        solve(logps, {**parts, "num_items_in_batch": count}, None, GlobalTokenMean()).loss
        for count in (torch.tensor(0), 1)
    )
    assert torch.equal(zero, one)


@pytest.mark.parametrize(
    "iterable", [list, iter, lambda corrections: (correction for correction in corrections)], ids=["list", "iterator",
                                                                                                   "generator"]
)  # fmt: skip
def test_corrections_from_any_iterable_count(iterable):
    logps, parts = columns()
    entropy = torch.rand(5, 6, dtype=torch.float64)
    corrections = (TopEntropyMask(top_entropy_quantile=0.5), OffPolicySequenceMask(threshold=0.0))
    expected = solve(logps, parts, entropy=entropy, corrections=corrections).loss
    assert torch.equal(solve(logps, parts, entropy=entropy, corrections=iterable(corrections)).loss, expected)
    assert solve(logps, parts, entropy=entropy).loss != expected
    with pytest.raises(ValueError, match="entropy must be given"):
        solve(logps, parts, corrections=iterable(corrections))


@pytest.mark.parametrize(
    ("name", "error", "value"),
    [
        *(("per_token_logps", ValueError, torch.zeros(shape)) for shape in ((5, 6, 2), ())),
        *(("per_token_logps", TypeError, x) for x in (torch.zeros(5, 6).long(), torch.zeros(5, 6).to_sparse(), None)),
        *(("batch", TypeError, x) for x in ({"advantages": torch.zeros(5)}, None)),
        *(("objective", TypeError, x) for x in (PPOClip, "grpo", lambda logps, batch: -logps, lambda *_: None)),
        *(("reduction", TypeError, x) for x in (TokenMean, 1.0, lambda batch: None)),
        *(("kl", TypeError, x) for x in (None, KLPenalty, 0.1)),
        *(("entropy_bonus", TypeError, x) for x in (None, EntropyBonus)),
        *(("sampler_correction", TypeError, x) for x in (SamplerCorrection, lambda logps, batch: 1.0)),
        *(("corrections", TypeError, x) for x in (None, OffPolicySequenceMask(threshold=0.1))),
        (r"corrections\[1\]", TypeError, [OffPolicySequenceMask(threshold=0.1), 1]),
        *((r"corrections\[0\]", TypeError, [x]) for x in (OffPolicySequenceMask, lambda logps, batch: None)),
        ("entropy", TypeError, torch.zeros(5, 6).to_sparse()),
        ("entropy", TypeError, torch.zeros(5, 6).long()),
        ("entropy", ValueError, torch.zeros(5, 5)),
        ("entropy", ValueError, torch.zeros(5, 6, device="meta")),
    ],
)
def test_what_is_of_another_kind_is_named(name, error, value):
    logps, parts = columns()
    arguments = {"per_token_logps": logps, "batch": PolicyBatch(**parts), "objective": PPOClip(),
                 "reduction": TokenMean()}  # fmt: skip
    with pytest.raises(error, match=rf"\b{name}"):
        ppo_loss_fn(**arguments | {name.split("\\")[0]: value})


@pytest.mark.parametrize("shape", [(), (5, 1), (1, 6)])
def test_an_objective_has_one_loss_for_each_token(shape):
    """A mean or a sum over a sequence would be broadcast, and weighed once for each token."""
    logps, parts = columns()

    def objective(logps, batch):
        return TokenLoss(-(logps * batch.advantages).sum_to_size(shape) if shape else -logps.mean())

    message = re.escape(f"the loss of objective must be (5, 6), one for each token, got {shape}")
    with pytest.raises(ValueError, match=message):
        solve(logps, parts, objective)
    hidden, weight = torch.randn(5, 6, 8, requires_grad=True), torch.randn(33, 8)
    head = hidden, weight, torch.randint(33, (5, 6)), torch.ones(5)
    with pytest.raises(ValueError, match=message):
        FusedLinearGRPOLoss(objective, reduction=TokenMean())(*head)


def test_a_factor_and_a_weight_are_broadcast_to_the_tokens_alone():
    """(N, 1) times (N,) would be (N, N)."""
    logps, batch = torch.randn(6), PolicyBatch(advantages=torch.randn(6))
    column = torch.ones(6, 1)
    for name, reduction, corrections in (
        ("reduction", lambda batch: column, ()),
        ("corrections[0]", TokenMean(), (lambda logps, batch: column,)),
    ):
        message = re.escape(f"the result of {name} must broadcast to (6,), one for each token, got (6, 1)")
        with pytest.raises(ValueError, match=message):
            ppo_loss_fn(logps, batch, PPOClip(), reduction, corrections=corrections)


class Reading:
    """A Reinforce that says what it reads."""

    scope = "token"
    zero_without_advantage = True

    def __init__(self, *names):
        self.names = set(names)

    def reads(self, level):
        return self.names

    def __call__(self, logps, batch):
        return TokenLoss(batch.advantages * ((0.0 if batch.lse is None else batch.lse) - logps))


def test_what_an_objective_says_it_reads_is_there():
    hidden, weight, ids = torch.randn(5, 6, 8), torch.randn(33, 8), torch.randint(33, (5, 6))
    found = FusedLinearGRPOLoss(Reading("lse"), reduction=TokenMean())(hidden, weight, ids, torch.ones(5)).loss
    logits = hidden @ weight.T
    torch.testing.assert_close(found, (2 * logits.logsumexp(-1) - logits.gather(-1, ids[..., None])[..., 0]).mean())
    with pytest.raises(ValueError, match=r"reads must return names among .*'lse'.*, got \['logits'\]"):
        FusedLinearGRPOLoss(Reading("logits"), reduction=TokenMean())
    packed = hidden.flatten(0, 1), weight, ids.flatten(), torch.ones(30)
    with Products() as products, pytest.raises(ValueError, match="segments must say which sequence"):
        FusedLinearGRPOLoss(Reading("segments"), reduction=TokenMean())(*packed)
    assert products.flops == 0


def test_an_objective_says_what_its_metrics_read():
    """Those of policies read sequences without advantages, which would not have run."""
    logps, parts = columns()
    del parts["ref_per_token_logps"]
    with pytest.raises(ValueError, match=r"reads\('basic'\) of the objective must name \['segments'\]"):
        solve(logps, parts, Reading(), metrics="basic")
    assert "ratio_new_old" in solve(logps, parts, Reading("segments"), metrics="basic").metrics


def test_a_reference_that_nothing_reads_warns():
    logps, parts = columns()
    hidden, weight = torch.randn(5, 6, 8), torch.randn(33, 8)
    ids, ref = torch.randint(33, (5, 6)), parts["ref_per_token_logps"].float()
    with pytest.warns(UserWarning, match="beta is 0"):
        solve(logps, parts)
    with pytest.warns(UserWarning, match="beta is 0") as warned:
        FusedLinearGRPOLoss("dapo")(hidden, weight, ids, torch.ones(5), ref_per_token_logps=ref)
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solve(logps, parts, kl=KLPenalty(beta=0.1))
        solve(logps, parts, lambda logps, batch: TokenLoss(batch.ref_per_token_logps - logps))
        FusedLinearGRPOLoss("dapo")(hidden, weight, ids, torch.ones(5))


def test_an_option_of_no_part_is_named_with_all_that_there_are():
    for loss_type, reduction in (("dapo", None), (lambda logps, batch: TokenLoss(-logps), TokenMean())):
        with pytest.raises(ValueError, match=r"no option temprature \(did you mean temperature\?\)") as error:
            FusedLinearGRPOLoss(loss_type, reduction=reduction, temprature=0.7)
        own = ("temperature", "softcap", "scale", "metrics", "chunk_tokens", "corrections")
        for known in (*own, "beta", "entropy_coef", *(("epsilon_low", "world_size") if reduction is None else ())):
            assert re.search(rf"\b{known}\b", str(error.value).partition(". It has")[2]), known
        assert "scope" not in str(error.value)  # an attribute of the class, which is no option
    with pytest.raises(ValueError, match=r"temprature \(did you mean temperature\?\).*kl_estimator"):
        grpo_loss_from_logits(torch.zeros(1, 2, 3), torch.zeros(1, 2).long(), torch.ones(1), temprature=0.7)
    for name in ("temperature", "softcap", "scale"):
        with pytest.raises(TypeError, match=rf"'{name}'; write transform=LogitTransform\({name}=0.7\)"):
            linear_logprobs(torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(2).long(), **{name: 0.7})


def test_an_unknown_keyword_names_the_right_one():
    loss, tensors = FusedLinearGRPOLoss("dapo"), [torch.zeros(2, 4)] * 4
    calls = {linear_logprobs: 3, logits_logprobs: 2, linear_divergence: 4, topk_divergence: 4, loss: 4}
    for function, count in {**calls, loss.reference_logps: 3}.items():
        with pytest.raises(
            TypeError, match=r"'completion_mask' \(did you mean mask\?\)\. Its arguments are .*\bmask\b"
        ):
            function(*tensors[:count], completion_mask=torch.ones(2))
    with pytest.raises(ValueError, match=r"no option completion_mask \(did you mean mask\?\)"):
        grpo_loss_from_logits(*tensors[:3], completion_mask=torch.ones(2))


# --- signatures, which editors and help() show ------------------------------------------------------------------------


def shown(function, names):
    """-> type and default of each keyword in the function's signature."""
    parameters = inspect.signature(function).parameters
    return {name: (parameters[name].annotation, parameters[name].default) for name in names}


def declared(*classes):
    """-> type, without the rule in it, and default of each field; the first class that has a name counts."""
    options = {}
    for field in (field for cls in classes for field in fields(cls) if field.init):
        kind = get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        options.setdefault(field.name, (kind, default))
    return options


CHUNKS = ("chunk_tokens", "chunk_vocab")


@pytest.mark.parametrize(
    ("function", "without"),
    [
        (linear_logprobs, ()),
        (linear_divergence, ("entropy", "lse", "extras", *CHUNKS)),
        (topk_divergence, CHUNKS),
    ],
)
def test_a_signature_shows_the_options_of_the_head(function, without):
    options = {name: option for name, option in declared(HeadOptions).items() if name not in without}
    assert shown(function, options) == options


def test_a_signature_shows_the_columns_of_a_batch_and_what_every_loss_has():
    options = declared(KLPenalty, EntropyBonus, LogitTransform)
    assert shown(FusedLinearGRPOLoss, options) == options
    batch = declared(PolicyBatch)
    del batch["advantages"]
    assert shown(FusedLinearGRPOLoss.forward, batch) == batch


# Option of another library, or of another loss -> (how it is asked, the message).
HINTS = {
    "use_bias_correction_kl": ({}, r" \(did you mean importance_weighted\?\)"),
    "vllm_importance_sampling_mode": ({}, r" \(did you mean sampler_correction\?\)"),
    "scale_rewards": ({}, ": advantages are given, so scale them before the call"),
    "cpo_alpha": ({}, "; nll_coef is an option of FusedLinearPreferenceLoss"),
    "rpo_alpha": ({}, "; nll_coef is an option of FusedLinearPreferenceLoss"),
    "sapo_temperature_pos": ({}, '; sapo_temperature_pos is an option of "sapo"'),
    "sapo_temperature_neg": ({}, '; sapo_temperature_neg is an option of "sapo"'),
    "clip_ratio": ({}, r" \(did you mean epsilon_low and epsilon_high\?\)"),
    "epsilon": ({}, r" \(did you mean epsilon_low and epsilon_high\?\)"),
    "eps": ({}, r" \(did you mean epsilon_low and epsilon_high\?\)"),
    "kl_coef": ({}, ": beta and kl_estimator of a policy loss are of a KL in the loss; a KL in the rewards goes into"),
    "kl_loss_coef": ({}, ": it is beta of a policy loss"),
    "kl_loss_type": ({}, r" \(did you mean kl_estimator\?\)"),
    "ignore_index": ({}, ": a token with a negative id does not count"),
    "loss_agg_mode": ({}, r" \(did you mean reduction\?\)"),
    "label_smoothing": ({}, "; label_smoothing is an option of FusedLinearPreferenceLoss, FusedLinearCrossEntropyLoss"),
    "max_new_tokens": ({}, r"\. It has "),  # no hint is better than the name of something else
    "epsilon_low": ({"loss_type": "cispo"}, ': ratio_min is 1 - epsilon_low; epsilon_low is an option of "grpo", '),
    "clip_ratio_low": (
        {"loss_type": "cispo"},
        ": ratio_min is 1 - clip_ratio_low; epsilon_low is an option",
    ),
    "clip_ratio_high": ({"loss_type": "cispo"}, r": epsilon_high is 1 \+ clip_ratio_high"),
    "alpha": ({}, r"\. It has "),
    "world_size": ({"loss_type": "grpo"}, r"; world_size is an option of GlobalTokenMean"),
}


@pytest.mark.parametrize("option", HINTS)
def test_options_of_others_are_explained(option):
    asked, message = HINTS[option]
    with pytest.raises(ValueError, match=rf"has no option {option}{message}"):
        FusedLinearGRPOLoss(**{"loss_type": "dapo", option: 1} | asked)


def test_names_of_other_losses_are_explained():
    for name, message in {
        "GRPO": r' \(did you mean "grpo"\?\)',
        "gspo-token": r' \(did you mean "gspo_token"\?\)',
        "ppo": ': "grpo", "bnpo", "dapo", "dr_grpo" of FusedLinearGRPOLoss clip as PPO does',
        "gpo": "$",  # gspo is another loss
        "dpo": ": FusedLinearPreferenceLoss has it",
        "kto": ": FusedLinearUnpairedLoss has it",
        "nll": ": FusedLinearCrossEntropyLoss has it",
    }.items():
        with pytest.raises(ValueError, match=rf"loss_type must be one of .*, got '{name}'{message}"):
            FusedLinearGRPOLoss(name)
    with pytest.raises(ValueError, match="got 'dapo': FusedLinearGRPOLoss has it"):
        FusedLinearPreferenceLoss("dapo")
    for name in ("cpo_alpha", "rpo_alpha"):
        with pytest.raises(ValueError, match=rf"no option {name} \(did you mean nll_coef\?\)"):
            FusedLinearPreferenceLoss("cpo", **{name: 1.0})
    with pytest.raises(TypeError, match=r"reduction must be callable, got 'mean'; write TokenMean\(\)"):
        FusedLinearGRPOLoss("dapo", reduction="mean")


POLICY = functools.partial(
    ppo_loss_fn, torch.zeros(2, 3), PolicyBatch(advantages=torch.zeros(2)), PPOClip(), TokenMean()
)
HEAD = functools.partial(linear_logprobs, torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(2).long())
BOUNDS = "did you mean epsilon_low and epsilon_high"
# Call, foreign name, what the message has to say. It names nothing else but in its list of all options.
CALLS = [
    *((PPOClip, name, rf" \({BOUNDS}\?\)") for name in ("epsilon", "eps", "clip_ratio", "cliprange", "eps_clip")),
    *((CISPO, name, f": ratio_min is 1 - {name}") for name in ("epsilon_low", "clip_ratio_low")),
    (CISPO, "eps", r": ratio_min is 1 - eps and epsilon_high is 1 \+ eps"),
    (SamplerCorrection, "clip_ratio", ""),
    (SAPO, "temperature", ""),
    *((cls, name, r" \(did you mean nll_coef\?\)") for cls in (CPO, DPO, ORPO) for name in ("cpo_alpha", "rpo_alpha")),
    (CPO, "alpha", ": alphapo_alpha is AlphaPO's exponent, TRL's alpha; nll_coef weighs the NLL, liger-kernel's alpha"),
    (DPO, "ld_alph", r" \(did you mean ld_alpha\?\)"),
    (KLPenalty, "use_bias_correction_kl", r" \(did you mean importance_weighted\?\)"),
    (PolicyBatch, "completion_mask", r" \(did you mean mask\?\)"),
    (LogitTransform, "temprature", r" \(did you mean temperature\?\)"),
    (POLICY, "beta", r"; write kl=KLPenalty\(beta=1\)"),
    (POLICY, "use_bias_correction_kl", r"; write kl=KLPenalty\(importance_weighted=1\)"),
    (POLICY, "response_mask", r"; write batch=PolicyBatch\(mask=1\)"),
    (POLICY, "clip_ratio", r"; write objective=PPOClip\(epsilon_low=..., epsilon_high=...\)"),
    (POLICY, "vllm_importance_sampling_mode", r" \(did you mean sampler_correction\?\)"),
    (POLICY, "loss_agg_mode", r" \(did you mean reduction\?\)"),
    *((HEAD, name, "") for name in ("alpha", "eps", "clip_ratio", "cpo_alpha", "loss_agg_mode")),
    (patch_trl, "mem", r" \(did you mean memory\?\)"),
    (patch_trl, "max_token", r" \(did you mean max_tokens\?\)"),
    (patch_trl, "beta", ""),
]


@pytest.mark.parametrize(("call", "name", "message"), CALLS)
def test_each_call_explains_a_name_of_another_library(call, name, message):
    with pytest.raises(TypeError, match=rf"got an unexpected argument '{name}'{message}(\. Its arguments are |$)"):
        call(**{name: 1})


def test_an_option_of_a_class_of_your_own():
    class Own(PPOClip):
        def __init__(self, factor):
            super().__init__(epsilon_low=factor)

    assert Own(factor=0.3).epsilon_low == 0.3
    assert replace(PPOClip(), delta=4.0).delta == 4.0


# Names in verl and OpenRLHF. Those of TRL and liger-kernel are read from their sources.
OTHERS_NAMES = """
clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c loss_agg_mode loss_scale_factor entropy_coeff kl_coef
use_kl_loss kl_loss_coef kl_loss_type kl_penalty policy_loss tis_imp_ratio_cap rollout_is rollout_rs grad_clip
ppo_mini_batch_size ppo_epochs use_kl_in_reward target_kl norm_adv_by_std_in_grpo adv_estimator gamma lam
lambd eps_clip eps_clip_low_high init_kl_coef kl_target kl_horizon kl_estimator value_clip dual_clip
entropy_loss_coef ptx_coef reward_clip_range use_kl_estimator_k3 micro_train_batch_size label_smoothing_factor
temperature_pos alpha entropy
"""


def foreign_names():
    names = set(OTHERS_NAMES.split())
    for package, pattern in (("trl", "**/*_config.py"), ("liger_kernel", "chunked_loss/*.py")):
        spec = importlib.util.find_spec(package)
        for path in [] if spec is None else Path(spec.submodule_search_locations[0]).glob(pattern):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    names.add(node.target.id)
                elif isinstance(node, ast.arg):
                    names.add(node.arg)
    return names


def test_no_name_of_another_library_gets_a_hint_with_another_meaning():
    """Its hint is in the tables, or has the same words in another number or spelling."""
    known = [[field.name for field in options] for options in FIELDS.values()]
    known += [list(declared(cls)) for cls in (PolicyBatch, LogitTransform, SamplerCorrection, OffPolicySequenceMask)]
    losses = (FusedLinearGRPOLoss, FusedLinearPreferenceLoss, FusedLinearUnpairedLoss, FusedLinearCrossEntropyLoss)
    calls = [f for loss in losses for f in (loss, loss.forward)]
    calls += [ppo_loss_fn, linear_logprobs, linear_divergence, topk_divergence, loss_steps, patch_trl]
    known += [list(inspect.signature(call).parameters) for call in calls]
    known += [[name for names in known for name in names]]
    same = {
        "target": "targets",
        "nll_target": "nll_targets",
        "loss_type": "loss_types",
        "entropy_coeff": "entropy_coef",
    }
    names = foreign_names()
    found = {(name, hint(name, names_here)) for name in names for names_here in known if name not in names_here}
    guessed = {(name, text) for name, text in found if text and name not in {*NAMES, *EXPLANATIONS, *BOTH_BOUNDS}}
    assert guessed <= {(name, f" (did you mean {meant}?)") for name, meant in same.items()}
    assert len(names) > 60


def test_every_name_that_a_hint_gives_exists():
    """Each is an option, an argument or a column of some loss."""
    losses = (FusedLinearGRPOLoss, FusedLinearPreferenceLoss, FusedLinearCrossEntropyLoss)
    calls = [f for loss in losses for f in (loss, loss.forward)]
    known = {name for f in (*calls, patch_trl) for name in inspect.signature(f).parameters}
    known |= {field.name for classes in FIELDS.values() for field in classes}
    assert {name for names in NAMES.values() for name in names} <= known
    assert not NAMES.keys() & known
    for name in REDUCTIONS.values():
        assert hasattr(liger_rl.losses, name.partition("(")[0])


def test_unknown_and_missing_names_are_named():
    for unknown in (["grpo"], PPOClip):
        with pytest.raises(TypeError, match="loss_type"):
            build_loss(unknown, {})
    with pytest.raises(ValueError, match="loss_type") as error:
        build_loss("ppo2", {})
    assert all(name in str(error.value) for name in PRESETS)
    with pytest.raises(ValueError, match="epsilon_hihg") as error:
        build_loss("dapo", {"epsilon_hihg": 0.3})
    for known in ("epsilon_low", "epsilon_high", "delta", "importance_sampling_level", "world_size", "beta"):
        assert known in str(error.value)
    with pytest.raises(ValueError, match="max_completion_length"):
        build_loss("grpo", {"max_completion_length": 8})  # an option of another preset's reduction
    with pytest.raises(ValueError, match="max_completion_length"):  # no default
        build_loss("dr_grpo", {})


NEEDED = {"dr_grpo": {"max_completion_length": 3.0}}
OPTIONS = {
    "beta": (0.0, 0.1), "kl_estimator": ("k1", "k3"), "importance_weighted": (True, False),
    "entropy_coef": (0.0, 0.1), "importance_sampling_level": ("token", "sequence"), "mean_advantages": (True, False),
    "temperature": (0.7, 2), "mean_importance_ratio": (True, False),
}  # fmt: skip
TERMS = {
    "sampler_correction": (SamplerCorrection(), SamplerCorrection(level="token")),
    "corrections": ([OffPolicySequenceMask(threshold=0.1)], [TopEntropyMask(top_entropy_quantile=0.5)]),
    "metrics": ("none", "loss", "basic", "with_entropy"),
}


@pytest.mark.parametrize("way", ["head", "log-probabilities", "logits"])
@pytest.mark.parametrize("preset", PRESETS)
def test_options_and_columns_of_any_kind_are_taken_or_refused(preset, way):
    """Drawn at random, each there or not. Every error is a ValueError or TypeError that the package raises."""
    draw, taken = random.Random(preset + way), 0
    needed = {} if (preset, way) == ("dr_grpo", "logits") else NEEDED.get(preset, {})  # which reduces nothing

    def some(choices, share=0.2):
        return {name: draw.choice(values) for name, values in choices.items() if draw.random() < share}

    for _ in range(40):
        shape = draw.choice([(2, 3), (6,)])
        hidden, weight, ids = torch.randn(*shape, 4, requires_grad=True), torch.randn(7, 4), torch.zeros(shape).long()
        per_token, segments = [-torch.rand(shape)], [Segments(index=torch.arange(6) // 3, count=2)]
        columns = some({
            "old_per_token_logps": per_token, "ref_per_token_logps": per_token, "sampling_per_token_logps": per_token,
            "importance_ratio": [torch.ones(shape), torch.ones(2)], "num_items_in_batch": [5],
        }, share=0.5) | some({"segments": segments}, share=0.8 if len(shape) == 1 else 0.1)  # fmt: skip
        mask = draw.choice([None, ids == 0, ids != 0])
        batch = PolicyBatch(advantages=torch.randn(shape), mask=mask, **columns)
        options, terms, refused = {**needed, **some(OPTIONS, share=0.1)}, some(TERMS), None
        try:
            if way == "head":
                module = FusedLinearGRPOLoss(preset, **terms, **options)
                loss = module(hidden, weight, ids, batch).loss
            elif way == "logits":
                loss = grpo_loss_from_logits(hidden @ weight.T, ids, batch, loss_type=preset, **options).loss
            else:
                parts = build_loss(preset, options)
                given = some({"entropy": per_token}, share=0.5)
                given |= {"kl": parts.kl, "entropy_bonus": parts.entropy_bonus, **terms}
                loss = ppo_loss_fn(hidden.sum(-1), batch, parts.objective, parts.reduction, **given).loss
            loss.sum().backward()
            taken += 1
        except (TypeError, ValueError) as error:
            refused = traceback.extract_tb(error.__traceback__)[-1].line
        assert refused is None or refused.startswith("raise "), refused
    assert taken > 2
