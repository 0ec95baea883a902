"""FusedLinearGRPOLoss: what it is made of, what it refuses, which tokens it projects.

Presets and options against oracle log-probabilities in an oracle loss are the fuzzer's.
"""

import pytest
import torch

from head_calls import Products
from liger_rl import FusedLinearGRPOLoss
from liger_rl.losses import OffPolicySequenceMask, PolicyBatch, PPOClip, SamplerCorrection, TokenLoss, TokenMean
from loss_calls import Batch, assert_same, batch, projected, step


def problem(rows=4, length=7, dtype=torch.float32, device="cpu", **more) -> Batch:
    data = batch(rows, length, dtype, device, idle=False, **more)
    return data.changed(importance_ratio=torch.exp(0.2 * torch.randn(rows, length)).to(device))


def reinforce(logps, batch):
    return TokenLoss(-batch.advantages * logps)


def test_own_objective():
    """A callable in place of a name; the penalty and the importance ratio still apply."""
    data, options = problem(), {"beta": 0.1, "temperature": 0.9}
    found = step(FusedLinearGRPOLoss(reinforce, reduction=TokenMean(), **options), data)
    assert_same(found._replace(metrics={}), step(FusedLinearGRPOLoss("gpg", **options), data)._replace(metrics={}))
    assert set(found.metrics) == {"kl_ref"}


def test_own_reduction_in_place_of_a_presets():
    data = problem()
    assert_same(step(FusedLinearGRPOLoss("grpo", reduction=TokenMean()), data), step(FusedLinearGRPOLoss("bnpo"), data))
    with pytest.raises(ValueError, match="no option world_size"):
        FusedLinearGRPOLoss("dapo", reduction=TokenMean(), world_size=4)
    FusedLinearGRPOLoss("dr_grpo", reduction=TokenMean())  # which needs no length


@pytest.mark.parametrize(
    ("match", "error", "arguments"),
    [
        ("dapo.*grpo", ValueError, {"loss_type": "ppo2"}),
        ("epsilon_low", ValueError, {"loss_type": "grpo", "epsilon": 0.1}),
        ("temperature", ValueError, {"loss_type": "grpo", "temperature": 0.0}),
        ("loss_type", TypeError, {"loss_type": 3}),
        ("reduction", ValueError, {"loss_type": lambda logps, batch: TokenLoss(logps)}),
        ("delta", ValueError, {"loss_type": lambda logps, batch: None, "reduction": TokenMean(), "delta": 2.0}),
        ("per_token", ValueError, {"loss_type": "grpo", "per_token": True}),
        (r"loss_type.*PPOClip\(", TypeError, {"loss_type": PPOClip}),
        ("metrics", ValueError, {"loss_type": "grpo", "metrics": ["basic"]}),
        ("chunk_vocab", ValueError, {"loss_type": "grpo", "chunk_vocab": 0}),
        ("no option passes. It has", ValueError, {"passes": "one"}),
    ],
)
def test_bad_options(match, error, arguments):
    with pytest.raises(error, match=match):
        FusedLinearGRPOLoss(**arguments)


def test_an_objective_that_returns_no_token_loss_is_named():
    loss = FusedLinearGRPOLoss(lambda logps, batch: -logps, reduction=TokenMean())
    with pytest.raises(TypeError, match="objective must be of type TokenLoss, got Tensor"):
        step(loss, problem())


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "gspo"},
        {"loss_type": "vespo"},
        {"loss_type": "gmpo"},
        {"loss_type": "dapo", "metrics": "basic"},
        {"loss_type": "dapo", "sampler_correction": SamplerCorrection(level="sequence")},
    ],
)
def test_packed_tokens_without_segments_are_refused_before_any_product(options):
    hidden, weight, ids = torch.randn(6, 8), torch.randn(11, 8), torch.zeros(6, dtype=torch.long)
    columns = {"old_per_token_logps": torch.zeros(6), "sampling_per_token_logps": torch.zeros(6)}
    with Products() as products, pytest.raises(ValueError, match="segments must"):
        FusedLinearGRPOLoss(**options)(hidden, weight, ids, torch.ones(6), **columns)
    assert products.flops == 0


# --- what counts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_token", [False, True])
def test_an_id_outside_the_vocabulary_raises_though_its_token_has_no_say(per_token):
    hidden, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(9, 4)
    advantages = torch.tensor([0.0, 1.0])
    if per_token:
        advantages = advantages[:, None].repeat(1, 3)
    solve = FusedLinearGRPOLoss("grpo")
    ids, mask = torch.tensor([[1, 2, 9], [3, 4, 5]]), torch.ones(2, 3)
    with pytest.raises(ValueError, match="1 of them are not, the largest is 9"):
        solve(hidden, weight, ids, advantages, mask)
    mask[0, 2] = 0
    assert solve(hidden, weight, ids, advantages, mask).loss.isfinite()


IDLE_CASES = [  # preset, its options, whether tokens without an advantage are left out
    ("grpo", {}, True),
    ("dapo", {"metrics": "none"}, True),
    ("cispo", {}, True),
    ("sapo", {}, True),
    ("gpg", {}, True),
    ("dppo", {}, True),
    ("dppo_kl", {}, True),
    ("ipo", {}, True),
    ("icepop", {}, True),
    ("cispo", {"ratio_min": 0.1}, True),
    ("grpo", {"beta": 0.1}, False),
    ("grpo", {"entropy_coef": 0.1}, False),
    ("grpo", {"metrics": "basic"}, False),
    ("grpo", {"corrections": (OffPolicySequenceMask(threshold=0.5),)}, False),
    ("grpo", {"mean_advantages": True}, False),
    ("gspo", {}, False),
    ("vespo", {}, False),
    ("gmpo", {}, False),
]


@pytest.mark.parametrize(("preset", "options", "left_out"), IDLE_CASES)
def test_tokens_without_advantage_are_left_out_where_nothing_needs_them(preset, options, left_out):
    data = problem()
    data.columns["advantages"][:2] = 0.0
    columns = data.columns
    if "corrections" in options:
        data = data.changed(sampling_per_token_logps=columns["old_per_token_logps"] + 0.1)
    data = data.changed(num_items_in_batch=20)
    module = FusedLinearGRPOLoss(preset, **options)
    wanted = columns["mask"] & (columns["advantages"] != 0)[:, None] if left_out else columns["mask"]
    assert projected(module, data) == wanted.sum()
    if left_out:  # metrics of every token keep them
        every = FusedLinearGRPOLoss(preset, **{**options, "metrics": "basic"})
        assert projected(every, data) == columns["mask"].sum()
        found, expected = step(module, data), step(every, data)
        assert found.metrics.keys() <= expected.metrics.keys()
        expected = expected._replace(metrics={name: expected.metrics[name] for name in found.metrics})
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_sampler_correction_of_current_log_probabilities(level):
    """Those of tokens without an advantage are in the ratio of their sequence."""
    data = problem().changed(importance_ratio=None)
    data.columns["advantages"] = data.columns["advantages"][:, None] * (torch.arange(7) % 2)
    module = FusedLinearGRPOLoss("grpo", sampler_correction=SamplerCorrection(level=level, mode="truncate"))
    data = data.changed(sampling_per_token_logps=data.columns["old_per_token_logps"], old_per_token_logps=None)
    hidden, weight, ids, bias = data.head
    current = module.reference_logps(hidden, weight, ids, bias=bias)
    assert_same(step(module, data), step(module, data.changed(old_per_token_logps=current)))
    wanted = data.columns["mask"] & ((torch.arange(7) % 2 == 1) | (level == "sequence"))
    assert projected(module, data) == wanted.sum()


class Damped(PPOClip):
    """With a term that an advantage of 0 leaves."""

    def __call__(self, logps, batch):
        plain = super().__call__(logps, batch)
        return plain._replace(loss=plain.loss + 0.1 * logps.square())


class Weighted(Damped):
    """With a formula that says of itself what it is."""

    zero_without_advantage = True

    def __call__(self, logps, batch):
        return reinforce(logps, batch)


class Renamed(Weighted):
    """With the formula that it inherits."""


class Module(torch.nn.Module):
    scope = "token"
    zero_without_advantage = True

    def forward(self, logps, batch):
        return reinforce(logps, batch)


class OtherModule(Module):
    def forward(self, logps, batch):
        return TokenLoss(-batch.advantages * logps + 0.1 * logps.square())


@pytest.mark.parametrize(
    ("objective", "left_out"),
    [(Damped, False), (Weighted, True), (Renamed, True), (Module, True), (OtherModule, False)],
)
def test_a_formula_of_its_own_has_to_say_that_an_advantage_of_zero_silences_it(objective, left_out):
    data = problem().changed(importance_ratio=None, old_per_token_logps=None, ref_per_token_logps=None)
    data = data.changed(advantages=torch.zeros(4))
    loss = FusedLinearGRPOLoss(objective(), reduction=TokenMean())
    every = FusedLinearGRPOLoss(objective(), reduction=TokenMean(), metrics="basic")
    assert_same(step(loss, data)._replace(metrics={}), step(every, data)._replace(metrics={}))
    assert projected(loss, data) == (0 if left_out else data.columns["mask"].sum())


def test_a_batch_is_taken_as_it_is():
    data, loss = problem(), FusedLinearGRPOLoss("dapo", beta=0.1)
    hidden, weight, ids, columns = data.head.hidden, data.head.weight, data.head.targets, dict(data.columns)
    advantages, mask = columns.pop("advantages"), columns.pop("mask")
    given = loss(hidden, weight, ids, advantages, mask, **columns)
    whole = PolicyBatch(advantages=advantages, mask=mask, **columns)
    assert torch.equal(loss(hidden, weight, ids, whole).loss, given.loss)
    with pytest.raises(TypeError, match="mask, num_sequences must be in the PolicyBatch"):
        loss(hidden, weight, ids, whole, mask, num_sequences=3)
    with pytest.raises(TypeError, match=r"'old_logps' \(did you mean old_per_token_logps\?\)"):
        loss(hidden, weight, ids, advantages, mask, old_logps=None)
