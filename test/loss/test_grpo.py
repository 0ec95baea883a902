"""FusedLinearGRPOLoss against oracle log-probabilities in an oracle loss, and against liger-kernel's Triton loss."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import oracles
from liger_rl import (
    FusedLinearGRPOLoss,
    KLPenalty,
    OffPolicySequenceMask,
    PolicyBatch,
    PPOClip,
    SamplerCorrection,
    TokenLoss,
    TokenMean,
    TopEntropyMask,
    linear_logprobs,
    one_pass_loss,
    ppo_loss_fn,
)
from liger_rl import grpo as grpo_module
from liger_rl.head.run import log_probs
from liger_rl.kernels import gemm
from liger_rl.policy.loss import PolicyTerms
from liger_rl.policy.penalties import k3
from liger_rl.policy.presets import build_preset

TRITON_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Head(NamedTuple):
    hidden: Tensor  # (B, T, H)
    weight: Tensor  # (V, H)
    bias: Tensor  # (V,)


def problem(batch=4, length=7, hidden_size=16, vocab=129, *, device="cpu", noise=0.3, transform=None):
    """-> head, ids, and the columns of a batch whose ratios cross the usual bounds."""
    head = Head(
        torch.randn(batch, length, hidden_size, device=device),
        torch.randn(vocab, hidden_size, device=device) / math.sqrt(hidden_size),
        torch.randn(vocab, device=device),
    )
    ids = torch.randint(vocab, (batch, length), device=device)
    current = oracles.logprobs(head.hidden, head.weight, ids, head.bias, **(transform or {}))[0].float()
    lengths = 1 + (torch.arange(batch, device=device) * 5 + length - 1) % length
    columns = {
        "advantages": torch.randn(batch, device=device),
        "mask": torch.arange(length, device=device) < lengths[:, None],
        "old_per_token_logps": current + noise * torch.randn(batch, length, device=device),
        "ref_per_token_logps": current + noise * torch.randn(batch, length, device=device),
        "importance_ratio": torch.exp(0.2 * torch.randn(batch, length, device=device)),
    }
    return head, ids, columns


def leaves_of(head: Head, dtype=torch.float32) -> Head:
    return Head(*(t.detach().to(dtype, copy=True).requires_grad_() for t in head))


def oracle(head, ids, columns, reduction, transform, counts, **options):
    """-> loss and gradients in float64."""
    leaves = leaves_of(Head(*(t.cpu() for t in head)), torch.float64)
    columns = {name: value.cpu() for name, value in columns.items()}
    logps = oracles.logprobs(leaves.hidden, leaves.weight, ids.cpu(), leaves.bias, **transform)[0]
    losses = oracles.token_losses(
        logps,
        columns["advantages"],
        columns["mask"],
        old=columns["old_per_token_logps"].double(),
        ref=columns["ref_per_token_logps"].double(),
        importance_ratio=columns["importance_ratio"],
        **options,
    )
    loss = oracles.reduce(losses, reduction, **counts)
    return loss.detach(), torch.autograd.grad(loss, leaves)


PRESET_CASES = [
    # preset, module options, transform, num_items_in_batch, loop options, loop counts
    ("grpo", {"beta": 0.1}, {}, None, {"beta": 0.1}, {}),
    ("bnpo", {"delta": 1.3}, {"temperature": 0.7}, None, {"delta": 1.3}, {}),
    ("dapo", {"epsilon_high": 0.28}, {"softcap": 3.0}, None, {"eps_high": 0.28}, {}),
    ("dapo", {"world_size": 2}, {}, 51, {}, {"num_items_in_batch": 51, "world_size": 2}),
    ("dr_grpo", {"max_completion_length": 11}, {"scale": 0.5}, None, {}, {"max_completion_length": 11}),
    (
        "gspo",
        {"epsilon_low": 0.03, "epsilon_high": 0.04, "beta": 0.04},
        {"temperature": 1.4, "softcap": 4.0, "scale": 2.0},
        None,
        {"eps_low": 0.03, "eps_high": 0.04, "beta": 0.04, "level": "sequence"},
        {},
    ),
]


@pytest.mark.parametrize(("preset", "options", "transform", "count", "told", "counts"), PRESET_CASES)
@pytest.mark.parametrize("chunks", [{}, {"chunk_tokens": 5, "chunk_vocab": 50}], ids=["default", "tiny"])
def test_presets(preset, options, transform, count, told, counts, chunks, device):
    head, ids, columns = problem(device=device, transform=transform)
    leaves = leaves_of(head)
    module = FusedLinearGRPOLoss(preset, **options, **transform, **chunks)
    found = module(leaves.hidden, leaves.weight, ids, bias=leaves.bias, num_items_in_batch=count, **columns)
    found.loss.backward()
    loss, gradients = oracle(head, ids, columns, preset, transform, counts, **told)
    assert found.loss.dtype == torch.float32
    assert found.loss.item() == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    for leaf, expected in zip(leaves, gradients, strict=True):
        assert expected.any()
        torch.testing.assert_close(leaf.grad.double().cpu(), expected, rtol=1e-4, atol=1e-6)
    assert set(found.metrics) == {"clip_low", "clip_high", "clip_ratio"} | ({"kl_ref"} if "beta" in options else set())


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_nothing_under_the_mask_matters(garbage, device):
    head, ids, columns = problem(device=device)
    keep = columns["mask"]
    module = FusedLinearGRPOLoss("gspo", beta=0.1)

    def run(hidden, ids, columns):
        leaves = leaves_of(head._replace(hidden=hidden))
        result = module(leaves.hidden, leaves.weight, ids, bias=leaves.bias, **columns)
        result.loss.backward()
        return [
            result.loss.detach(),
            *(leaf.grad for leaf in leaves),
            *(metric.value for metric in result.metrics.values()),
        ]

    dirty = {
        name: value.masked_fill(~keep, garbage) if name.endswith(("logps", "ratio")) else value
        for name, value in columns.items()
    }
    found = run(head.hidden.masked_fill(~keep[..., None], garbage), ids.masked_fill(~keep, 10**9), dirty)
    for mine, expected in zip(found, run(head.hidden, ids, columns), strict=True):
        assert torch.equal(mine, expected)
    # A negative id masks as the mask does.
    by_id = run(head.hidden, ids.masked_fill(~keep, -100), {**columns, "mask": None})
    for mine, expected in zip(by_id, run(head.hidden, ids, columns), strict=True):
        assert torch.equal(mine, expected)


def test_packed_tokens():
    head, ids, columns = problem()
    padded = FusedLinearGRPOLoss("dapo")(head.hidden, head.weight, ids, bias=head.bias, **columns).loss
    keep = columns["mask"]
    columns["advantages"] = columns["advantages"][:, None].expand(keep.shape)
    packed = {name: value[keep] for name, value in columns.items() if name != "mask"}
    found = FusedLinearGRPOLoss("dapo")(head.hidden[keep], head.weight, ids[keep], bias=head.bias, **packed).loss
    torch.testing.assert_close(found, padded, rtol=1e-6, atol=1e-7)


def test_low_precision_head():
    head, ids, columns = problem()
    head = Head(*(t.bfloat16() for t in head))
    leaves = leaves_of(head, torch.bfloat16)
    found = FusedLinearGRPOLoss("grpo")(leaves.hidden, leaves.weight, ids, bias=leaves.bias, **columns).loss
    found.backward()
    loss, gradients = oracle(head, ids, columns, "grpo", {}, {})
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(loss.item(), rel=1e-5)
    for leaf, expected in zip(leaves, gradients, strict=True):
        assert leaf.grad.dtype == torch.bfloat16
        scale = torch.finfo(torch.bfloat16).eps * expected.abs().max().item()
        torch.testing.assert_close(leaf.grad.double(), expected, rtol=0.0, atol=2 * scale)


def test_own_objective():
    """A callable in place of a name; the penalty and the importance ratio still apply."""
    head, ids, columns = problem()

    def reinforce(logps, batch):
        return TokenLoss(-batch.advantages * logps)

    leaves = leaves_of(head)
    module = FusedLinearGRPOLoss(reinforce, reduction=TokenMean(), beta=0.1, temperature=0.9)
    found = module(leaves.hidden, leaves.weight, ids, bias=leaves.bias, **columns)
    doubles = leaves_of(head, torch.float64)
    logps = oracles.logprobs(doubles.hidden, doubles.weight, ids, doubles.bias, temperature=0.9)[0]
    kl = torch.exp(columns["ref_per_token_logps"] - logps) - (columns["ref_per_token_logps"] - logps) - 1
    tokens = -columns["importance_ratio"] * columns["advantages"][:, None] * logps + 0.1 * kl
    expected = tokens[columns["mask"]].mean()
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert set(found.metrics) == {"kl_ref"}
    for mine, other in zip(
        torch.autograd.grad(found.loss, leaves), torch.autograd.grad(expected, doubles), strict=True
    ):
        torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=1e-6)


def test_own_reduction_in_place_of_a_presets():
    head, ids, columns = problem()
    mine = FusedLinearGRPOLoss("grpo", reduction=TokenMean())(head.hidden, head.weight, ids, **columns).loss
    other = FusedLinearGRPOLoss("bnpo")(head.hidden, head.weight, ids, **columns).loss
    assert torch.equal(mine, other)


def test_reference_logps_use_the_modules_transform_and_carry_no_gradient():
    head, ids, columns = problem()
    leaves = leaves_of(head)
    module = FusedLinearGRPOLoss("grpo", temperature=0.6, softcap=5.0)
    found = module.reference_logps(leaves.hidden, leaves.weight, ids, columns["mask"], bias=leaves.bias)
    expected = oracles.logprobs(head.hidden, head.weight, ids, head.bias, temperature=0.6, softcap=5.0)[0]
    assert found.dtype == torch.float32
    assert not found.requires_grad
    keep = columns["mask"]
    torch.testing.assert_close(found[keep].double(), expected[keep], rtol=1e-5, atol=1e-5)
    assert (found[~keep] == 0).all()


def test_on_policy_without_old_has_ratio_one():
    head, ids, columns = problem()
    module = FusedLinearGRPOLoss("bnpo")
    result = module(head.hidden, head.weight, ids, columns["advantages"], columns["mask"])
    expected = -columns["advantages"][:, None].expand(ids.shape)[columns["mask"]].mean()
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    assert result.metrics["clip_ratio"].value == 0


@pytest.mark.parametrize(
    ("name", "error", "arguments"),
    [
        ("hidden", ValueError, {"hidden": torch.zeros(7, 4, 1, 16)}),
        ("weight", ValueError, {"weight": torch.zeros(129, 15)}),
        ("bias", ValueError, {"bias": torch.zeros(3)}),
        ("selected_token_ids", ValueError, {"selected_token_ids": torch.zeros(4, 8, dtype=torch.int64)}),
        ("selected_token_ids", TypeError, {"selected_token_ids": torch.zeros(4, 7)}),
        ("ids", ValueError, {"selected_token_ids": torch.full((4, 7), 129)}),
        ("mask", ValueError, {"mask": torch.ones(4)}),
        ("advantages", ValueError, {"advantages": torch.zeros(3)}),
        ("advantages", TypeError, {"advantages": None}),
        ("old_per_token_logps", ValueError, {"old_per_token_logps": torch.zeros(4, 6)}),
        ("ref_per_token_logps", ValueError, {"ref_per_token_logps": None}),
        ("importance_ratio", ValueError, {"importance_ratio": torch.zeros(4, 2)}),
        ("advantages", TypeError, {"advantages": torch.ones(4).to_sparse()}),
        ("old_per_token_logps", TypeError, {"old_per_token_logps": torch.zeros(4, 7).to_sparse()}),
        ("num_items_in_batch", ValueError, {"num_items_in_batch": 0}),
        ("num_items_in_batch", ValueError, {"num_items_in_batch": math.nan}),
        ("num_sequences", ValueError, {"num_sequences": -4}),
        ("num_sequences", ValueError, {"num_sequences": math.inf}),
    ],
)
def test_bad_arguments_are_named_before_any_product(name, error, arguments, monkeypatch):
    head, ids, columns = problem()
    good = {"hidden": head.hidden, "weight": head.weight, "selected_token_ids": ids, **columns}

    def fail(*args):
        pytest.fail("a product was computed")

    monkeypatch.setattr(gemm, "matmul", fail)
    with pytest.raises(error, match=rf"\b{name}\b"):
        FusedLinearGRPOLoss("grpo", beta=0.1)(**{**good, **arguments})


@pytest.mark.parametrize(
    ("match", "error", "arguments"),
    [
        ("dapo.*grpo", ValueError, {"loss_type": "ppo2"}),
        ("epsilon_low", ValueError, {"loss_type": "grpo", "epsilon": 0.1}),
        ("max_completion_length", ValueError, {"loss_type": "dr_grpo"}),
        ("epsilon_low", ValueError, {"loss_type": "grpo", "epsilon_low": -0.1}),
        ("temperature", ValueError, {"loss_type": "grpo", "temperature": 0.0}),
        ("beta", ValueError, {"loss_type": "grpo", "beta": -1.0}),
        ("loss_type", TypeError, {"loss_type": 3}),
        ("reduction", ValueError, {"loss_type": lambda logps, batch: TokenLoss(logps)}),
        ("delta", ValueError, {"loss_type": lambda logps, batch: None, "reduction": TokenMean(), "delta": 2.0}),
        ("per_token", ValueError, {"loss_type": "grpo", "per_token": True}),
        (r"loss_type.*PPOClip\(", TypeError, {"loss_type": PPOClip, "reduction": TokenMean()}),
        (r"loss_type.*PPOClip\(", TypeError, {"loss_type": PPOClip}),
        (r"reduction.*TokenMean\(", TypeError, {"loss_type": "grpo", "reduction": TokenMean}),
        ("sampler_correction", TypeError, {"loss_type": "grpo", "sampler_correction": SamplerCorrection}),
        (r"corrections\[0\]", TypeError, {"loss_type": "grpo", "corrections": [1]}),
        (r"corrections\[0\]", TypeError, {"loss_type": "grpo", "corrections": (TopEntropyMask,)}),
        ("corrections", TypeError, {"loss_type": "grpo", "corrections": None}),
        ("world_size", ValueError, {"loss_type": "dapo", "world_size": True}),
        ("importance_weighted", TypeError, {"loss_type": "grpo", "beta": 0.1, "importance_weighted": "yes"}),
        ("dro_beta", ValueError, {"loss_type": "dro"}),
        ("divergence_low", ValueError, {"loss_type": "dppo", "divergence_low": 2}),
        ("metrics", ValueError, {"loss_type": "grpo", "metrics": ["basic"]}),
    ],
)
def test_bad_options(match, error, arguments):
    with pytest.raises(error, match=match):
        FusedLinearGRPOLoss(**arguments)


# --- liger-kernel's Triton loss, on full logits -----------------------------------------------------------------------


class Case(NamedTuple):
    batch: int
    length: int
    hidden_size: int
    vocab: int
    loss_type: str = "dapo"
    level: str = "token"
    beta: float = 0.0
    temperature: float = 1.0
    eps_low: float = 0.2
    eps_high: float = 0.2
    delta: float | None = None
    masked: bool = True
    old: bool = True
    count: int | None = None


SEQUENCE = {"level": "sequence", "eps_low": 0.03, "eps_high": 0.04}
CASES = [
    Case(1, 17, 8, 33, "grpo"),
    Case(3, 9, 12, 131, "grpo", beta=0.04),
    Case(4, 6, 16, 1000, "grpo", beta=0.1, temperature=0.7, masked=False),
    Case(5, 7, 20, 257, "grpo", eps_low=0.1, eps_high=0.3, delta=1.5),
    Case(6, 5, 7, 77, "grpo", beta=0.04, **SEQUENCE),
    Case(8, 4, 16, 513, "grpo", temperature=1.3, masked=False, **SEQUENCE),
    Case(2, 11, 9, 300, "bnpo"),
    Case(7, 3, 31, 65, "bnpo", beta=0.2, temperature=0.9),
    Case(6, 6, 10, 129, "bnpo", delta=1.02, **SEQUENCE),
    Case(3, 8, 24, 2500, "dapo", eps_high=0.28),
    Case(4, 5, 16, 99, "dapo", beta=0.04, count=37, temperature=0.9),
    Case(5, 5, 5, 55, "dapo", count=80, **SEQUENCE),
    Case(2, 13, 16, 4099, "dapo", masked=False, delta=1.3),
    Case(3, 10, 11, 222, "dr_grpo"),
    Case(6, 4, 13, 101, "dr_grpo", beta=0.1, temperature=1.5),
    Case(7, 4, 18, 401, "dr_grpo", beta=0.02, **SEQUENCE),
    Case(4, 5, 16, 129, "grpo", beta=0.1, old=False),
    Case(4, 5, 16, 129, "grpo", old=False, **SEQUENCE),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.loss_type}-{c.level}-{c.batch}x{c.length}x{c.vocab}")
def test_chunked_vs_triton_grpo_loss(case):
    """Tiles of logits and autograd here, full logits and a hand-written backward there."""
    liger = pytest.importorskip("liger_kernel.transformers.grpo_loss", reason="liger-kernel is not installed")
    head, ids, columns = problem(
        case.batch, case.length, case.hidden_size, case.vocab,
        device=TRITON_DEVICE, transform={"temperature": case.temperature},
    )  # fmt: skip
    # That loss has no bias and reads one position more than there are ids.
    current = oracles.logprobs(head.hidden, head.weight, ids, temperature=case.temperature)[0].float()
    old = current + 0.3 * torch.randn_like(current) if case.old else None
    ref = current + 0.3 * torch.randn_like(current) if case.beta else None
    mask = columns["mask"] if case.masked else None
    counted = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    length = 2 * case.length if case.loss_type == "dr_grpo" else None
    extended = torch.cat([head.hidden, torch.randn_like(head.hidden[:, :1])], 1)

    def theirs(reduce):
        hidden, weight = extended.clone().requires_grad_(), head.weight.clone().requires_grad_()
        result = liger.triton_grpo_loss(
            (hidden @ weight.mT).contiguous(), old, ref, ids, columns["advantages"],
            None if mask is None else mask.float(), case.temperature, case.beta, case.eps_low, case.eps_high, False,
            case.loss_type, length, case.level, reduce, delta=case.delta, num_items_in_batch=case.count,
        )  # fmt: skip
        return result, (hidden, weight)

    options = {"epsilon_low": case.eps_low, "epsilon_high": case.eps_high, "delta": case.delta, "beta": case.beta}
    options["importance_sampling_level"] = case.level
    if length is not None:
        options["max_completion_length"] = length
    module = FusedLinearGRPOLoss(
        case.loss_type, **options, temperature=case.temperature, chunk_tokens=5, chunk_vocab=48
    )
    hidden, weight = head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()

    # Token by token.
    objective, _, penalty, _ = build_preset(case.loss_type, **options)
    batch = PolicyBatch(
        advantages=columns["advantages"], completion_mask=mask, old_per_token_logps=old, ref_per_token_logps=ref
    )
    logps = linear_logprobs(hidden, weight, ids, mask=mask, transform=module.transform).logps
    tokens = ppo_loss_fn(logps, batch, objective, None, kl=penalty).loss
    (their_tokens, their_kl, their_clipped), _ = theirs(reduce=False)
    torch.testing.assert_close(tokens, their_tokens, rtol=1e-5, atol=1e-5)
    clipping = objective(logps, batch.checked(ids.shape, ids.device).cleaned(torch.float32))
    clipped = (clipping.clip_low | clipping.clip_high).expand_as(ids) & counted
    assert torch.equal(clipped, their_clipped.bool())
    assert clipped.any() == case.old
    if case.beta:
        torch.testing.assert_close(k3(logps, ref)[counted], their_kl[counted], rtol=1e-5, atol=1e-5)

    # Reduced, with gradients of the head.
    found = module(
        hidden, weight, ids, columns["advantages"], mask,
        old_per_token_logps=old, ref_per_token_logps=ref, num_items_in_batch=case.count,
    )  # fmt: skip
    (their_loss, their_metrics), their_leaves = theirs(reduce=True)
    torch.testing.assert_close(found.loss, their_loss, rtol=1e-5, atol=1e-6)
    names = ["kl_ref", "clip_ratio"] if case.beta else ["clip_ratio"]
    for name, value in zip(names, their_metrics, strict=True):
        torch.testing.assert_close(found.metrics[name].value, value, rtol=1e-5, atol=1e-6)
    mine = torch.autograd.grad(found.loss, (hidden, weight))
    grad_hidden, grad_weight = torch.autograd.grad(their_loss, their_leaves)
    assert grad_weight.any()
    for a, b in ((mine[0], grad_hidden[:, :-1]), (mine[1], grad_weight)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


def test_kl_penalty_is_k3_with_its_coefficient():
    logps, ref = torch.tensor([[-1.0]]), torch.tensor([[-1.5]])
    assert k3(logps, ref).item() == pytest.approx(math.exp(-0.5) + 0.5 - 1, rel=1e-6)
    batch = PolicyBatch(advantages=torch.zeros(1), ref_per_token_logps=ref)
    loss = ppo_loss_fn(logps, batch, build_preset("grpo")[0], TokenMean(), kl=KLPenalty(beta=3.0)).loss
    assert loss.item() == pytest.approx(3 * (math.exp(-0.5) - 0.5), rel=1e-6)


def test_an_objective_that_returns_no_token_loss_is_named():
    head, ids, columns = problem()
    loss = FusedLinearGRPOLoss(lambda logps, batch: -logps, reduction=TokenMean())
    with pytest.raises(TypeError, match="objective must be of type TokenLoss, got Tensor"):
        loss(head.hidden, head.weight, ids, **columns)


def test_other_policies_get_no_gradient():
    head, ids, columns = problem()
    columns = {k: v.clone().requires_grad_() if v.is_floating_point() else v for k, v in columns.items()}
    for passes in ("two", "one"):
        FusedLinearGRPOLoss("grpo", beta=0.1, passes=passes)(
            head.hidden.clone().requires_grad_(), head.weight, ids, **columns
        ).loss.backward()
        assert all(column.grad is None for column in columns.values())


def test_options_of_a_replaced_reduction_are_unknown():
    with pytest.raises(ValueError, match="no option world_size"):
        FusedLinearGRPOLoss("dapo", reduction=TokenMean(), world_size=4)
    FusedLinearGRPOLoss("dr_grpo", reduction=TokenMean())  # which needs no length


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
def test_packed_tokens_without_segments_are_refused_before_any_product(options, monkeypatch):
    monkeypatch.setattr(gemm, "matmul", lambda *_: pytest.fail("a product ran"))
    hidden, weight, ids = torch.randn(6, 8), torch.randn(11, 8), torch.zeros(6, dtype=torch.long)
    with pytest.raises(ValueError, match="segments must"):
        FusedLinearGRPOLoss(**options)(
            hidden, weight, ids, torch.ones(6), old_per_token_logps=torch.zeros(6),
            sampling_per_token_logps=torch.zeros(6),
        )  # fmt: skip


def test_options_of_a_wrong_type_are_named():
    for name, options in {"epsilon_low": {"epsilon_low": "a"}, "beta": {"beta": None}, "delta": {"delta": "1"}}.items():
        with pytest.raises(TypeError, match=name):
            FusedLinearGRPOLoss("grpo", **options)
    with pytest.raises(ValueError, match="chunk_vocab"):
        FusedLinearGRPOLoss("grpo", chunk_vocab=0)


def test_another_default_dtype_changes_nothing():
    hidden, weight, ids = torch.randn(6, 8), torch.randn(11, 8), torch.randint(0, 11, (6,))
    expected = linear_logprobs(hidden, weight, ids, entropy=True)
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            found = linear_logprobs(hidden, weight, ids, entropy=True)
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(found[:2], expected[:2], strict=True))


def test_what_is_not_a_sharded_head_is_refused():
    hidden, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    with pytest.raises(TypeError, match="vocab_parallel must be a VocabParallel or None, got str"):
        FusedLinearGRPOLoss("grpo")(
            hidden, weight, torch.zeros(2, 3, dtype=torch.int64), torch.ones(2), vocab_parallel="all of it"
        )


@pytest.mark.parametrize("passes", ["two", "one"])
@pytest.mark.parametrize("fixed_shape", [False, True])
def test_ids_of_a_dtype_that_does_not_hold_the_vocabulary_size(passes, fixed_shape):
    if passes == "one" and fixed_shape:
        pytest.skip("one pass has no fixed shape")
    hidden, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(300, 4)
    ids = torch.tensor([[1, 2, 3], [44, 100, 127]])
    loss = FusedLinearGRPOLoss("gpg", passes=passes, fixed_shape=fixed_shape)
    grads = []
    for dtype in (torch.int64, torch.int8, torch.uint8):
        grads += torch.autograd.grad(loss(hidden, weight, ids.to(dtype), torch.ones(2)).loss, hidden)
    assert (grads[0] != 0).any(-1).all()
    for grad in grads[1:]:
        assert torch.equal(grad, grads[0])


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("how", ["two", "one", "compiled"])
def test_an_id_outside_the_vocabulary_raises_though_its_token_has_no_say(how, per_token):
    hidden, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(9, 4)
    advantages = torch.tensor([0.0, 1.0])
    if per_token:
        advantages = advantages[:, None].repeat(1, 3)
    loss = FusedLinearGRPOLoss("grpo", passes="auto" if how == "compiled" else how)
    solve = torch.compile(loss, backend="aot_eager") if how == "compiled" else loss
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
    ("cispo", {"ratio_min": 0.1}, True),
    ("dro", {"dro_beta": 0.3}, False),
    ("grpo", {"beta": 0.1}, False),
    ("grpo", {"entropy_coef": 0.1}, False),
    ("grpo", {"metrics": "basic"}, False),
    ("grpo", {"corrections": (OffPolicySequenceMask(threshold=0.5),)}, False),
    ("grpo", {"mean_advantages": True}, False),
    ("gspo", {}, False),
    ("vespo", {}, False),
    ("gmpo", {}, False),
    ("clip_cov", {}, False),
    ("kl_cov", {}, False),
]


@pytest.mark.parametrize("passes", ["two", "one"])
@pytest.mark.parametrize(("preset", "options", "left_out"), IDLE_CASES)
def test_tokens_without_advantage_are_left_out_where_nothing_needs_them(preset, options, left_out, passes, monkeypatch):
    head, ids, columns = problem()
    columns["advantages"][:2] = 0.0
    reference = columns.pop("ref_per_token_logps")
    if "beta" in options:
        columns["ref_per_token_logps"] = reference
    if "corrections" in options:
        columns["sampling_per_token_logps"] = columns["old_per_token_logps"] + 0.1
    if preset == "vespo":
        columns.pop("importance_ratio")

    def solve():
        leaves = leaves_of(head)
        found = FusedLinearGRPOLoss(preset, passes=passes, **options)(
            leaves.hidden, leaves.weight, ids, bias=leaves.bias, num_items_in_batch=20, **columns
        )
        grads = torch.autograd.grad(found.loss, leaves)
        return found, grads

    seen = []

    def counted(function):
        def spy(*args, **kwargs):
            projected = function(*args, **kwargs)
            seen.append((projected.logps != 0).sum().item())
            return projected

        return spy

    monkeypatch.setattr(grpo_module, "log_probs", counted(log_probs))
    monkeypatch.setattr(one_pass_loss, "one_pass", counted(one_pass_loss.one_pass))
    found, grads = solve()
    expected_tokens = columns["mask"] & (columns["advantages"] != 0)[:, None] if left_out else columns["mask"]
    assert seen == [expected_tokens.sum().item()]
    with monkeypatch.context() as patch:
        patch.setattr(PolicyTerms, "tokens_to_project", lambda self, given: None)
        expected, expected_grads = solve()
    torch.testing.assert_close(found.loss, expected.loss)
    for name, metric in expected.metrics.items():
        torch.testing.assert_close(found.metrics[name].value, metric.value)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad)


class Damped(PPOClip):
    """With a term that an advantage of 0 leaves."""

    def __call__(self, logps, batch):
        plain = super().__call__(logps, batch)
        return plain._replace(loss=plain.loss + 0.1 * logps.square())


class Weighted(Damped):
    """With a formula that says of itself what it is."""

    zero_without_advantage = True

    def __call__(self, logps, batch):
        return TokenLoss(-batch.advantages * logps)


class Renamed(Weighted):
    """With the formula that it inherits."""


class Module(torch.nn.Module):
    token_local = True
    zero_without_advantage = True

    def forward(self, logps, batch):
        return TokenLoss(-batch.advantages * logps)


class OtherModule(Module):
    def forward(self, logps, batch):
        return TokenLoss(-batch.advantages * logps + 0.1 * logps.square())


@pytest.mark.parametrize("passes", ["two", "one"])
@pytest.mark.parametrize(
    ("objective", "left_out"),
    [(Damped, False), (Weighted, True), (Renamed, True), (Module, True), (OtherModule, False)],
)
def test_a_formula_of_its_own_has_to_say_that_an_advantage_of_zero_silences_it(objective, left_out, passes):
    head, ids, columns = problem()
    advantages = torch.zeros_like(columns["advantages"])
    leaves = leaves_of(head)
    loss = FusedLinearGRPOLoss(objective(), reduction=TokenMean(), passes=passes)
    found = loss(leaves.hidden, leaves.weight, ids, advantages, columns["mask"], bias=leaves.bias).loss
    batch = PolicyBatch(advantages=advantages, completion_mask=columns["mask"])
    logps = linear_logprobs(leaves.hidden, leaves.weight, ids, bias=leaves.bias).logps
    expected = ppo_loss_fn(logps, batch, objective(), TokenMean()).loss
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(*(torch.autograd.grad(value, leaves) for value in (found, expected)), strict=True):
        torch.testing.assert_close(mine, theirs)
    given = loss.terms.check(batch, ids.shape, ids.device)
    say = loss.terms.tokens_to_project(given)
    assert (say is not None) == left_out
    assert say is None or not say.any()


def test_a_batch_is_taken_as_it_is():
    head, ids, columns = problem()
    loss, advantages, mask = FusedLinearGRPOLoss("dapo", beta=0.1), columns.pop("advantages"), columns.pop("mask")
    given = loss(head.hidden, head.weight, ids, advantages, mask, **columns)
    whole = PolicyBatch(advantages=advantages, completion_mask=mask, **columns)
    assert torch.equal(loss(head.hidden, head.weight, ids, whole).loss, given.loss)
    with pytest.raises(TypeError, match="mask, num_sequences must be in the PolicyBatch"):
        loss(head.hidden, head.weight, ids, whole, mask, num_sequences=3)
    with pytest.raises(TypeError, match="unexpected argument 'old_logps'; its columns are old_per_token_logps"):
        loss(head.hidden, head.weight, ids, advantages, mask, old_logps=None)
