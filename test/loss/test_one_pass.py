"""One pass against two: the same loss, metrics and gradients; what it may hold, and when it is chosen."""

import math
from typing import NamedTuple

import pytest
import torch
from test_logprobs import Products
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import oracles
from liger_rl import (
    FusedLinearGRPOLoss,
    LogitTransform,
    LowRank,
    OffPolicySequenceMask,
    PolicyBatch,
    SamplerCorrection,
    Segments,
    TokenLoss,
    TokenMean,
    TopEntropyMask,
    grpo,
    linear_logprobs,
    one_pass_loss,
    plan_linear_logprobs,
)
from liger_rl.head.engines import choose, one_pass
from liger_rl.head.engines import two_pass as projection
from liger_rl.kernels import compiled
from liger_rl.kernels.saved_exponentials import Kept

VOCAB, HIDDEN = 129, 16


class Batch(NamedTuple):
    hidden: Tensor  # (B, T, H)
    weight: Tensor  # (V, H)
    bias: Tensor  # (V,)
    ids: Tensor  # (B, T)
    columns: dict[str, Tensor]


def batch(rows=6, length=9, dtype=torch.float32, device="cpu", vocab=VOCAB, hidden_size=HIDDEN) -> Batch:
    """Ratios cross the usual bounds, lengths differ, every third sequence has no advantage."""
    hidden = torch.randn(rows, length, hidden_size).to(device, dtype)
    weight = (torch.randn(vocab, hidden_size) / math.sqrt(hidden_size)).to(device, dtype)
    bias = torch.randn(vocab).to(device, dtype)
    ids = torch.randint(vocab, (rows, length)).to(device)
    current = oracles.logprobs(hidden, weight, ids, bias)[0].float()

    def near(noise: float) -> Tensor:
        return current + noise * torch.randn(rows, length).to(device)

    advantages = torch.randn(rows).to(device)
    advantages[::3] = 0.0
    lengths = 1 + (torch.arange(rows, device=device) * 5 + length - 1) % length
    columns = {
        "advantages": advantages,
        "mask": torch.arange(length, device=device) < lengths[:, None],
        "old_per_token_logps": near(0.3),
        "ref_per_token_logps": near(0.3),
    }
    return Batch(hidden, weight, bias, ids, columns)


class Step(NamedTuple):
    loss: Tensor
    metrics: dict[str, Tensor]
    grads: list[Tensor | None]  # hidden, weight, bias


def leaves_of(data: Batch, frozen=()) -> list[Tensor]:
    named = {"hidden": data.hidden, "weight": data.weight, "bias": data.bias}
    return [t.detach().clone().requires_grad_(name not in frozen) for name, t in named.items()]


def step(module: FusedLinearGRPOLoss, data: Batch, factor: float = 1.0, frozen=(), **more) -> Step:
    hidden, weight, bias = leaves = leaves_of(data, frozen)
    loss, metrics = module(hidden, weight, data.ids, bias=bias, **{**data.columns, **more})
    (loss * factor).backward()
    values = {name: metric.value for name, metric in metrics.items()}
    return Step(loss.detach(), values, [leaf.grad for leaf in leaves])


def error(found: Tensor, expected: Tensor) -> float:
    norm = torch.linalg.norm(expected.double()).item()
    return torch.linalg.norm(found.double() - expected.double()).item() / max(norm, 1e-30)


def assert_same(found: Step, expected: Step, tolerance: float = 1e-6, loss_tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found.loss, expected.loss, rtol=loss_tolerance, atol=1e-7)
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in found.metrics.items():
        torch.testing.assert_close(value, expected.metrics[name], rtol=1e-6, atol=1e-6, msg=name)
    for mine, other in zip(found.grads, expected.grads, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert mine.dtype == other.dtype
            assert error(mine, other) <= tolerance


def both(loss_type, options, data, *, chunk_tokens=None, **more) -> tuple[Step, Step]:
    chunks = {"chunk_tokens": chunk_tokens, "chunk_vocab": None if chunk_tokens is None else 50}
    one = FusedLinearGRPOLoss(loss_type, passes="one", **chunks, **options)
    two = FusedLinearGRPOLoss(loss_type, passes="two", **options)
    return step(one, data, **more), step(two, data, **more)


@pytest.fixture
def passes_taken(monkeypatch):
    """The number of chunks of each one pass."""
    taken = []

    def counted(*args, **options):
        taken.append(len(args[5]))
        return one_pass.one_pass(*args, **options)

    monkeypatch.setattr(one_pass_loss, "one_pass", counted)
    return taken


EVERY_TOKEN = {"metrics": "basic"}  # reads all log-probabilities, those of tokens without an advantage too
TOKEN_LOCAL = {
    "grpo": ("grpo", {}),
    "grpo-kl": ("grpo", {"beta": 0.1, "metrics": "basic"}),
    "bnpo-delta": ("bnpo", {"delta": 1.3, "dual_clip": 2.0}),
    "dapo-entropy": ("dapo", {"entropy_coef": 0.02, "epsilon_high": 0.28, "metrics": "with_entropy"}),
    "dr_grpo-all": ("dr_grpo", {"max_completion_length": 11, "beta": 0.1, "entropy_coef": -0.1, "scale": 0.5}),
    "luspo-softcap": ("luspo", {"softcap": 3.0, "temperature": 0.7}),
    "cispo-kl": ("cispo", {"beta": 0.1, "importance_weighted": True, "kl_estimator": "k2"}),
    "sapo": ("sapo", {"metrics": "none"}),
    "gpg": ("gpg", {}),
    "dppo": ("dppo", {"metrics": "basic"}),
}
BY_SEQUENCE = {
    "gspo": ("gspo", {"epsilon_low": 0.03, "epsilon_high": 0.04, "metrics": "basic"}),
    "gspo_token-kl": ("gspo_token", {"beta": 0.1}),
    "vespo": ("vespo", {}),
    "gmpo-entropy": ("gmpo", {"entropy_coef": 0.02}),
    "mean_advantages": ("grpo", {"mean_advantages": True}),
    "off-policy mask": ("grpo", {"corrections": (OffPolicySequenceMask(threshold=0.05),)}),
}
BY_BATCH = {
    "kl_cov": ("kl_cov", {"kl_cov_ratio": 0.1}),
    "top entropy": ("grpo", {"corrections": (TopEntropyMask(top_entropy_quantile=0.3),), "entropy_coef": 0.1}),
}


# --- the same as two passes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_tokens", [None, 1, 7, 1000])
@pytest.mark.parametrize(("preset", "options"), TOKEN_LOCAL.values(), ids=TOKEN_LOCAL)
def test_token_local_losses_in_any_chunks(preset, options, chunk_tokens, device, passes_taken):
    data = batch(device=device)
    assert_same(*both(preset, options, data, chunk_tokens=chunk_tokens))
    projected = data.columns["mask"]
    if not {"beta", "entropy_coef"} & options.keys() and options.get("metrics", "loss") in ("none", "loss"):
        projected = projected & (data.columns["advantages"] != 0)[:, None]
    n = int(projected.sum())
    assert passes_taken == [1 if chunk_tokens is None else math.ceil(n / min(chunk_tokens, n))]


@pytest.mark.parametrize("chunk_tokens", [None, 9, 20])
@pytest.mark.parametrize(("preset", "options"), BY_SEQUENCE.values(), ids=BY_SEQUENCE)
def test_losses_by_sequence_in_chunks_of_whole_sequences(preset, options, chunk_tokens, device, passes_taken):
    data = batch(device=device)
    found, expected = both(preset, options, data, chunk_tokens=chunk_tokens)
    assert (passes_taken[0] > 1) == (chunk_tokens is not None)
    if preset != "vespo":
        assert_same(found, expected)
        return
    # It takes the exponential of a sequence's sum of log-ratios: the errors of as many log-probabilities add up, and
    # each may be twice that of eager PyTorch.
    given = data.hidden, data.weight, data.ids, data.bias
    one_logp = 2 * oracles.max_error(oracles.eager_logprobs(*given)[0], oracles.logprobs(*given)[0])
    assert 1e-7 < one_logp < 2e-6
    tolerance = data.ids.shape[1] * one_logp
    assert_same(found, expected, tolerance, loss_tolerance=tolerance)


@pytest.mark.parametrize(("preset", "options"), BY_BATCH.values(), ids=BY_BATCH)
def test_losses_of_a_whole_batch_in_one_chunk(preset, options, device, passes_taken):
    assert_same(*both(preset, options, batch(device=device)))
    assert passes_taken == [1]


@pytest.mark.parametrize("chunk_tokens", [None, 7])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_sampler_correction(level, chunk_tokens, device):
    data = batch(device=device)
    data.columns["sampling_per_token_logps"] = data.columns["old_per_token_logps"] + 0.2 * torch.randn(6, 9).to(device)
    correction = SamplerCorrection(level=level, mode="truncate", ratio_max=1.2)
    assert_same(*both("grpo", {"sampler_correction": correction}, data, chunk_tokens=chunk_tokens))


@pytest.mark.parametrize("chunk_tokens", [None, 7])
def test_importance_ratios_and_advantages_per_token(chunk_tokens, device):
    data = batch(device=device)
    data.columns["importance_ratio"] = torch.rand(6, 9).to(device) + 0.5
    data.columns["advantages"] = torch.randn(6, 9).to(device)
    data.columns["num_items_in_batch"] = torch.tensor(51, device=device)
    assert_same(*both("dapo", {"world_size": 2}, data, chunk_tokens=chunk_tokens))


@pytest.mark.parametrize(("preset", "chunk_tokens"), [("grpo", 7), ("gspo", None)])
def test_packed_tokens(preset, chunk_tokens, device, passes_taken):
    data = batch(device=device)
    keep = data.columns["mask"]
    columns = {name: (c if c.dim() == 2 else c[:, None].expand(keep.shape))[keep] for name, c in data.columns.items()}
    index = torch.arange(6, device=device)[:, None].expand(keep.shape)[keep]
    packed = data._replace(hidden=data.hidden[keep], ids=data.ids[keep], columns=columns)
    segments = Segments(index=index, count=6)
    found, expected = both(preset, {"metrics": "basic"}, packed, chunk_tokens=chunk_tokens, segments=segments)
    assert_same(found, expected)
    padded = step(FusedLinearGRPOLoss(preset, passes="one", metrics="basic"), data)
    torch.testing.assert_close(found.loss, padded.loss, rtol=1e-5, atol=1e-7)
    assert error(found.grads[1], padded.grads[1]) < 1e-5


class WeighedBySequence:
    """A token's gradient depends on that token alone, and on which sequence it is of."""

    token_local = True

    def __call__(self, logps, batch):
        return TokenLoss(-batch.advantages * logps * (1.0 + batch.segments.index.to(logps.dtype)))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("objective", ["grpo", "gspo", WeighedBySequence()], ids=["grpo", "gspo", "own"])
def test_chunks_where_every_token_counts(objective, packed, device, passes_taken):
    """Those are views and no gathered copies; the sequences that a packed batch names reach every objective."""
    data = batch(device=device)
    data = data._replace(columns={**data.columns, "mask": torch.ones_like(data.columns["mask"])})
    more = {}
    if packed:
        rows, length = data.ids.shape
        columns = {name: c.view(rows, -1).expand(rows, length).flatten() for name, c in data.columns.items()}
        data = data._replace(hidden=data.hidden.flatten(0, 1), ids=data.ids.flatten(), columns=columns)
        more["segments"] = Segments(index=torch.arange(rows, device=device).repeat_interleave(length), count=rows)
    elif not isinstance(objective, str):
        pytest.skip("rows of a padded batch are no segments in two passes")
    options = {} if isinstance(objective, str) else {"reduction": TokenMean()}
    chunk_tokens = 7
    if objective == "gspo":
        chunk_tokens = None if packed else 2 * data.ids.shape[1]  # a packed batch is in one chunk, a padded one in rows
    assert_same(*both(objective, options, data, chunk_tokens=chunk_tokens, **more))
    assert passes_taken[0] > 1 or chunk_tokens is None


def test_on_policy_without_old(device):
    data = batch(device=device)
    del data.columns["old_per_token_logps"]
    assert_same(*both("grpo", {"metrics": "basic"}, data, chunk_tokens=7))


@pytest.mark.parametrize("chunk_tokens", [None, 5])
def test_nothing_under_the_mask_matters(chunk_tokens, device):
    data = batch(device=device)
    keep = data.columns["mask"]
    dirty = data._replace(
        hidden=data.hidden.masked_fill(~keep[..., None], math.nan),
        ids=data.ids.masked_fill(~keep, 10**9),
        columns={n: c.masked_fill(~keep, math.inf) if n.endswith("logps") else c for n, c in data.columns.items()},
    )
    module = FusedLinearGRPOLoss("grpo", beta=0.1, passes="one", chunk_tokens=chunk_tokens)
    found, expected = step(module, dirty), step(module, data)
    assert torch.equal(found.loss, expected.loss)
    for mine, other in zip(found.grads, expected.grads, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("loss_type", ["grpo", "gspo"])
def test_no_live_token(loss_type, device):
    data = batch(device=device)
    data.columns["mask"] = torch.zeros_like(data.columns["mask"])
    found, expected = both(loss_type, {}, data, chunk_tokens=9)
    assert_same(found, expected)
    assert not any(grad.any() for grad in found.grads)


def test_no_row_with_a_gradient(device):
    data = batch(device=device)
    data.columns["advantages"] = torch.zeros(6, device=device)
    found, expected = both("grpo", {}, data, chunk_tokens=9)
    assert_same(found, expected)
    assert not any(grad.any() for grad in found.grads)


def test_a_live_target_outside_the_vocabulary_is_an_error(device):
    data = batch(device=device)
    data.ids[0, 0] = VOCAB
    with pytest.raises(ValueError, match="token ids in"):
        step(FusedLinearGRPOLoss("grpo", passes="one"), data)


def test_a_nan_reaches_the_gradients(device):
    data = batch(device=device)
    data.hidden[1, 0] = math.nan
    for mine, other in zip(*(result.grads for result in both("gpg", {}, data)), strict=True):
        assert mine.isnan().any()
        assert torch.equal(mine.isnan(), other.isnan())


def bfloat16_shape(tokens, vocab, hidden_size, device, *, needs=(True, True), chunk_tokens=None) -> choose.HeadShape:
    return choose.HeadShape(
        tokens=tokens, vocab=vocab, hidden_size=hidden_size, dtype=torch.bfloat16, weight_dtype=torch.bfloat16,
        device=torch.device(device), needs=needs, bias=False, rank=0, in_place=False,
        options=projection.ProjectionOptions(
            transform=LogitTransform(), entropy=False, compute_dtype=torch.bfloat16,
            chunk_tokens=chunk_tokens, chunk_vocab=None,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_sequences_are_kept_whole_in_as_few_chunks_as_planned(seed):
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 60, (12,), generator=generator).tolist()
    for chunk_tokens in (60, 100, 150, 200, 400):
        shape = bfloat16_shape(sum(counts), 100, 8, "cpu", chunk_tokens=chunk_tokens)
        plan = choose.plan_one_pass(shape, "one", together=max(counts))
        assert plan.chunk_tokens <= chunk_tokens
        chunks = one_pass_loss._whole_rows(counts, plan.chunk_tokens)
        ends = {0, *torch.tensor(counts).cumsum(0).tolist()}
        assert [0, *(c.stop for c in chunks)] == [*(c.start for c in chunks), sum(counts)]
        assert all(c.start in ends and 0 <= c.stop - c.start <= plan.chunk_tokens for c in chunks)
        if plan.sum_dtype == torch.bfloat16:
            assert len(chunks) <= choose.MAX_ROUNDINGS


# --- low precision ----------------------------------------------------------------------------------------------------


def truth(data: Batch, loss_type, **options) -> Step:
    """The loss and its gradients in float64."""
    doubles = [t.detach().double().requires_grad_() for t in (data.hidden, data.weight, data.bias)]
    transform = {name: options[name] for name in ("softcap", "temperature", "scale") if name in options}
    logps, entropy = oracles.logprobs(doubles[0], doubles[1], data.ids, doubles[2], **transform)
    module = FusedLinearGRPOLoss(loss_type, **options)
    columns = dict(data.columns)
    given = PolicyBatch(completion_mask=columns.pop("mask"), **columns)
    given = module.terms.check(given, data.ids.shape, data.ids.device)
    prepared = module.terms.prepared(given, torch.float64)
    loss = prepared.evaluate(logps, entropy).loss
    loss.backward()
    return Step(loss.detach(), {}, [leaf.grad for leaf in doubles])


@pytest.mark.parametrize(("chunk_tokens", "chunks"), [(None, 1), (128, 2), (48, 4)])
@pytest.mark.parametrize(
    "options",
    [EVERY_TOKEN, {"beta": 0.1, "entropy_coef": 0.05}, {"softcap": 4.0, "entropy_coef": 0.05, "temperature": 0.8}],
    ids=["plain", "kl and entropy", "softcap"],
)
def test_bfloat16_error(options, chunk_tokens, chunks, device, passes_taken):
    """At most 3e-3, whether the sum over chunks is rounded after each of two, or float32."""
    data = batch(16, 24, torch.bfloat16, device, vocab=517, hidden_size=64)
    expected = truth(data, "dapo", **options)
    found = step(FusedLinearGRPOLoss("dapo", passes="one", chunk_tokens=chunk_tokens, **options), data)
    assert passes_taken == [chunks]
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=2e-5, abs=1e-6)
    for mine, other in zip(found.grads[:2], expected.grads[:2], strict=True):
        assert mine.dtype == torch.bfloat16
        assert error(mine, other) < 3e-3


def test_bfloat16_error_of_four_roundings(passes_taken):
    """Within a budget that has no room for a float32 sum: twice the error of one rounding, at most."""
    data = batch(17, 61, torch.bfloat16, vocab=517, hidden_size=64)
    data.columns["mask"][:] = True
    data.columns["advantages"][:] = torch.randn(17)
    sizes = {"needs": (True, True), "bias": True, "device": "cpu", "dtype": torch.bfloat16, "passes": "one"}
    least = plan_linear_logprobs(1037, 517, 64, **sizes).one_pass_bytes
    module = FusedLinearGRPOLoss("dapo", passes="one", max_extra_bytes=least)
    found, expected = step(module, data), truth(data, "dapo")
    assert passes_taken == [4]
    for mine, other in zip(found.grads[:2], expected.grads[:2], strict=True):
        assert error(mine, other) < 3.5e-3


def test_autocast(device):
    data = batch(device=device)
    with torch.autocast(device.type, torch.bfloat16):
        found, expected = both("grpo", {"beta": 0.1}, data, chunk_tokens=20)
    assert found.grads[1].dtype == torch.float32
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=1e-7)
    for mine, other in zip(found.grads, expected.grads, strict=True):
        assert error(mine, other) < 3e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("preset", "options"), [TOKEN_LOCAL["grpo-kl"], TOKEN_LOCAL["dapo-entropy"]])
@pytest.mark.parametrize("chunk_tokens", [None, 3])
def test_on_triton(dtype, preset, options, chunk_tokens, device, monkeypatch):
    """The whole path with its Triton kernels; on CPU by the interpreter."""
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    for module in (projection, one_pass):
        monkeypatch.setattr(module, "for_device", lambda device: compiled)
    if dtype == torch.float16:  # which the interpreter rounds to as it should, unlike bfloat16
        monkeypatch.setattr(grpo, "one_pass_obstacle", lambda *_, **__: None)
    data = batch(2, 5, dtype, device, vocab=300)
    found, expected = both(preset, options, data, chunk_tokens=chunk_tokens)
    assert_same(found, expected, 1e-6 if dtype == torch.float32 else 2e-3)


def improbable(data: Batch, size: float) -> Batch:
    """Each second hidden state away from its target's row, so that logits reach from -size to size."""
    rows = data.weight[data.ids].float()
    hidden = data.hidden.float() * (size / 4)
    hidden[:, ::2] -= size * (rows / rows.square().sum(-1, keepdim=True))[:, ::2]
    return data._replace(hidden=hidden.to(data.hidden.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [1.0, 5.0, 30.0, 50.0, 1e4])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.05])
@pytest.mark.parametrize("chunk_tokens", [None, 48])
def test_improbable_targets_under_a_softcap(softcap, entropy_coef, dtype, chunk_tokens, device):
    data = improbable(batch(8, 24, dtype, device, vocab=517, hidden_size=64), 2 * min(softcap, 100.0))
    options = {"softcap": softcap, "entropy_coef": entropy_coef, "scale": 0.5, "temperature": 0.8}
    del data.columns["old_per_token_logps"]  # ratios of 1: the gradient of no token is cut
    expected = truth(data, "gpg", **options)
    one, two = (
        step(FusedLinearGRPOLoss("gpg", passes=passes, **options, **chunks), data)
        for passes, chunks in (("one", {"chunk_tokens": chunk_tokens}), ("two", {}))
    )
    for mine, other, exact in zip(one.grads, two.grads, expected.grads, strict=True):
        assert error(mine, exact) < 1.3 * error(other, exact) + (2e-3 if dtype == torch.bfloat16 else 1e-6)


def test_the_gradient_of_one_improbable_target():
    hidden, weight = torch.ones(1, 1, dtype=torch.bfloat16), torch.zeros(300, 1, dtype=torch.bfloat16)
    weight[0], weight[1] = 30, -10
    weight.requires_grad_()
    loss = FusedLinearGRPOLoss("gpg", softcap=30.0)(hidden, weight, torch.tensor([1]), torch.tensor([1.0])).loss
    loss.backward()
    assert weight.grad[1].item() == pytest.approx(math.tanh(1 / 3) ** 2 - 1, rel=4e-3)


# --- autograd ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [65536.0, 0.25, 1 / 3, 0.0])
def test_the_loss_may_be_scaled(factor, device):
    """By GradScaler, by the number of micro-batches, by hand: the gradients of two passes."""
    assert_same(*both("dapo", {"beta": 0.1}, batch(device=device), factor=factor))


@pytest.mark.parametrize("factor", [65536.0, 1 / 3])
def test_a_scaled_loss_in_bfloat16(factor, device):
    """A power of two changes no digit, any other factor costs one more rounding."""
    data = batch(16, 24, torch.bfloat16, device, vocab=517, hidden_size=64)
    expected = truth(data, "dapo", beta=0.1)
    module = FusedLinearGRPOLoss("dapo", beta=0.1, passes="one")
    found, plain = step(module, data, factor=factor), step(module, data)
    for mine, other, unscaled in zip(found.grads[:2], expected.grads[:2], plain.grads[:2], strict=True):
        assert error(mine, factor * other) < 3e-3
        assert torch.equal(mine.double(), factor * unscaled.double()) == (factor == 65536.0)


def test_backward_with_a_gradient(device):
    data = batch(device=device)
    hidden, weight, bias = leaves_of(data)
    loss = FusedLinearGRPOLoss("grpo", passes="one")(hidden, weight, data.ids, bias=bias, **data.columns).loss
    loss.backward(gradient=torch.tensor(3.0, device=device))
    expected = step(FusedLinearGRPOLoss("grpo", passes="two"), data, factor=3.0)
    for mine, other in zip((hidden, weight, bias), expected.grads, strict=True):
        assert error(mine.grad, other) < 1e-6


def test_second_backward_gives_the_same_gradients(device):
    data = batch(device=device)
    leaves = leaves_of(data)
    loss = FusedLinearGRPOLoss("grpo", passes="one")(
        leaves[0], leaves[1], data.ids, bias=leaves[2], **data.columns
    ).loss
    first = torch.autograd.grad(2 * loss, leaves, retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    for gradient in first:
        gradient.zero_()  # whoever got them may write to them
    second = torch.autograd.grad(2 * loss, leaves)
    for mine, other in zip(second, kept, strict=True):
        assert torch.equal(mine, other)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("in_place", [False, True], ids=["returned", "in place"])
def test_saved_tensors_are_never_written_to(in_place, device):
    """Hooks are given tensors, clone or move them, and give back their own; none of these may change."""
    data = batch(device=device)
    expected = step(FusedLinearGRPOLoss("grpo", passes="one"), data, factor=3.0)
    seen = []

    def pack(tensor):
        seen.append((tensor, tensor.clone()))
        return tensor

    def unpack(tensor):
        seen.append((tensor, tensor.clone()))
        return tensor

    leaves = leaves_of(data)
    more = {"weight_grad": torch.zeros_like(data.weight)} if in_place else {}
    module = FusedLinearGRPOLoss("grpo", passes="one")
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = module(leaves[0], leaves[1], data.ids, bias=leaves[2], **data.columns, **more).loss
        (3 * loss).backward()
    assert seen or not in_place
    assert all(torch.equal(tensor, before) for tensor, before in seen)
    with torch.autograd.graph.save_on_cpu():
        others = leaves_of(data)
        again = {"weight_grad": torch.zeros_like(data.weight)} if in_place else {}
        loss = module(others[0], others[1], data.ids, bias=others[2], **data.columns, **again).loss
    (3 * loss).backward()
    for found, buffers in ((leaves, more), (others, again)):
        grads = [leaf.grad for leaf in found]
        grads[1] = buffers.get("weight_grad", grads[1])
        for mine, other in zip(grads, expected.grads, strict=True):
            assert error(mine, other) < 1e-6


def test_a_backward_gives_its_gradients_away(device):
    """What the forward made is the weight's `grad`, scaled where it lies, and nothing else keeps it alive."""
    data = batch(device=device)
    leaves = leaves_of(data)
    loss = FusedLinearGRPOLoss("grpo", passes="one")(
        leaves[0], leaves[1], data.ids, bias=leaves[2], **data.columns
    ).loss
    made = [gradient.data_ptr() for gradient in loss.grad_fn.gradients]
    (3 * loss).backward()
    assert [leaf.grad.data_ptr() for leaf in leaves[1:]] == made[1:]
    assert loss.grad_fn.gradients is None


def test_gradients_accumulate(device):
    data = batch(device=device)
    module = FusedLinearGRPOLoss("grpo", passes="one")
    hidden, weight, bias = leaves_of(data)
    once = step(module, data)
    for _ in range(2):
        module(hidden, weight, data.ids, bias=bias, **data.columns).loss.backward()
    torch.testing.assert_close(weight.grad, 2 * once.grads[1])
    torch.testing.assert_close(hidden.grad, 2 * once.grads[0])


def test_inputs_are_left_alone(device):
    data = batch(device=device)
    before = [t.clone() for t in (*data[:4], *data.columns.values())]
    step(FusedLinearGRPOLoss("grpo", passes="one"), data)
    for mine, other in zip((*data[:4], *data.columns.values()), before, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("chunk_tokens", [None, 7])
def test_two_runs_are_bitwise_equal(chunk_tokens, device):
    data = batch(device=device)
    module = FusedLinearGRPOLoss("grpo", passes="one", chunk_tokens=chunk_tokens)
    runs = [step(module, data) for _ in range(2)]
    assert torch.equal(runs[0].loss, runs[1].loss)
    for mine, other in zip(runs[0].grads, runs[1].grads, strict=True):
        assert torch.equal(mine, other)


def test_strided_hidden_states(device):
    data = batch(device=device)
    wide = torch.randn(6, 10, 2 * HIDDEN, device=device)
    wide[:, :-1, ::2] = data.hidden
    leaf = wide.requires_grad_()
    module = FusedLinearGRPOLoss("grpo", passes="one")
    module(leaf[:, :-1, ::2], data.weight, data.ids, bias=data.bias, **data.columns).loss.backward()
    assert error(leaf.grad[:, :-1, ::2], step(module, data).grads[0]) < 1e-6


# --- what costs nothing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [("hidden",), ("weight",), ("bias",), ("hidden", "weight"), ("weight", "bias")])
def test_frozen_inputs_get_none_and_cost_no_product(frozen):
    data = batch()
    found, expected = both("grpo", EVERY_TOKEN, data, chunk_tokens=20, frozen=frozen)
    assert_same(found, expected)
    hidden, weight, bias = leaves_of(data, frozen)
    n = int(data.columns["mask"].sum())
    rows = found_rows(data)
    with Products() as products:
        FusedLinearGRPOLoss("grpo", passes="one", chunk_tokens=20, **EVERY_TOKEN)(
            hidden, weight, data.ids, bias=bias, **data.columns
        ).loss.backward()
    wanted = ("hidden" not in frozen) + ("weight" not in frozen)
    assert products.flops == 2 * HIDDEN * VOCAB * (n + wanted * rows)


def found_rows(data: Batch) -> int:
    """Tokens with a gradient under "grpo"."""
    logps = linear_logprobs(data.hidden, data.weight, data.ids, bias=data.bias, mask=data.columns["mask"]).logps
    ratio = (logps - data.columns["old_per_token_logps"]).exp()
    advantages = data.columns["advantages"][:, None]
    cut = ((ratio < 0.8) & (advantages < 0)) | ((ratio > 1.2) & (advantages > 0)) | (advantages == 0)
    return int((data.columns["mask"] & ~cut).sum())


class Picks(TorchDispatchMode):
    """Counts what waits for a device to know how many rows there are, or what a number is."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in ("aten::nonzero", "aten::_local_scalar_dense", "aten::masked_select")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("advantages", "expected"), [("all", 0), ("some", 3)])
def test_rows_are_picked_once_a_chunk_and_only_where_that_pays(advantages, expected):
    data = batch(6, 9)
    data.columns["mask"][:] = True
    if advantages == "all":
        data.columns["advantages"] = torch.rand(6) + 0.1
    hidden, weight, bias = leaves_of(data)
    module = FusedLinearGRPOLoss("grpo", passes="one", chunk_tokens=18, **EVERY_TOKEN)
    with Picks() as picks:
        module(hidden, weight, data.ids, bias=bias, **data.columns).loss.backward()
    assert picks.count == expected


@pytest.mark.parametrize("gradients", ["none wanted", "switched off"])
def test_no_gradient_asked_for_runs_the_forward_alone(gradients, passes_taken):
    data = batch()
    frozen = ("hidden", "weight", "bias") if gradients == "none wanted" else ()
    hidden, weight, bias = leaves_of(data, frozen)
    n = int(data.columns["mask"].sum())
    with Products() as products, torch.set_grad_enabled(gradients == "none wanted"):
        module = FusedLinearGRPOLoss("grpo", passes="one", **EVERY_TOKEN)
        loss = module(hidden, weight, data.ids, bias=bias, **data.columns).loss
    assert products.flops == 2 * n * HIDDEN * VOCAB
    assert not loss.requires_grad
    assert not passes_taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_tokens", [8, 40], ids=["float32 sum", "rounded sum"])
def test_no_tensor_larger_than_what_a_chunk_keeps(dtype, chunk_tokens):
    """One gradient of the weight, one float32 sum where the plan says so, no tile beyond chunk_tokens x V."""
    data = batch(8, 8, dtype, vocab=1000, hidden_size=4)
    data.columns["mask"][:] = True
    hidden, weight, bias = leaves_of(data)
    module = FusedLinearGRPOLoss("grpo", passes="one", beta=0.1, chunk_tokens=chunk_tokens, chunk_vocab=64)
    with Products() as products:
        module(hidden, weight, data.ids, bias=bias, **data.columns).loss.backward()
    itemsize = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2, torch.bool: 1, torch.int64: 8}
    kept = chunk_tokens * 1000 * dtype.itemsize
    large = [(shape, kind) for shape, kind in products.made if math.prod(shape) * itemsize[kind] >= 8000]
    weights = [(shape, kind) for shape, kind in large if shape == (1000, 4)]
    summed = torch.float32 if chunk_tokens == 8 else dtype
    assert {kind for _, kind in weights} == {dtype, summed}
    assert all(math.prod(shape) * itemsize[kind] <= max(kept, 4 * chunk_tokens * 64) for shape, kind in large)


# --- the weight's gradient in place -----------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", ["one", "two"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_four_micro_batches_in_place_equal_one_batch(dtype, passes, device):
    data = batch(8, 9, dtype, device)
    data.columns["num_items_in_batch"] = int(data.columns["mask"].sum())
    module = FusedLinearGRPOLoss("dapo", beta=0.1, passes=passes)
    whole = step(FusedLinearGRPOLoss("dapo", beta=0.1, passes="two"), data, factor=0.5)
    total = torch.zeros(VOCAB, HIDDEN, device=device)
    for start in range(0, 8, 2):
        rows = slice(start, start + 2)
        columns = {n: c[rows] if isinstance(c, Tensor) else c for n, c in data.columns.items()}
        part = data._replace(hidden=data.hidden[rows], ids=data.ids[rows], columns=columns)
        found = step(module, part, factor=0.5, weight_grad=total)
        assert found.grads[1] is None
        assert error(found.grads[0], whole.grads[0][rows]) < (1e-6 if dtype == torch.float32 else 4e-3)
    assert error(total, whole.grads[1]) < (2e-6 if dtype == torch.float32 else 4e-3)


def test_a_forward_adds_nothing_and_every_backward_adds(device):
    data = batch(device=device)
    total = torch.zeros(VOCAB, HIDDEN, device=device)
    hidden, weight, bias = leaves_of(data)
    loss = FusedLinearGRPOLoss("grpo", passes="one")(
        hidden, weight, data.ids, bias=bias, weight_grad=total, **data.columns
    ).loss
    assert not total.any()
    loss.backward(retain_graph=True)
    once = total.clone()
    assert error(once, step(FusedLinearGRPOLoss("grpo", passes="two"), data).grads[1]) < 1e-6
    loss.backward()
    torch.testing.assert_close(total, 2 * once)


def test_no_tensor_of_the_weights_size_is_made_in_place():
    data = batch(2, 4, torch.bfloat16, vocab=1000, hidden_size=64)
    hidden, weight, bias = leaves_of(data)
    total = torch.zeros(1000, 64)
    with Products() as products:
        FusedLinearGRPOLoss("grpo", passes="one", beta=0.1)(
            hidden, weight, data.ids, bias=bias, weight_grad=total, **data.columns
        ).loss.backward()
    assert max(math.prod(shape) for shape, _ in products.made) <= 1000 * 64 / 2
    assert total.any()


# --- when it is taken -------------------------------------------------------------------------------------------------


def own(logps, batch):
    return TokenLoss(-batch.advantages * logps)


class Scaled(nn.Module):
    token_local = True

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, logps, batch):
        return TokenLoss(-self.factor * batch.advantages * logps)


@pytest.mark.parametrize(
    ("message", "loss_type", "options", "call"),
    [
        (r"grad_tolerance = 0\.0, got 0\.001", "grpo", {"grad_tolerance": 1e-3}, {}),
        ("fixed_shape = False", "grpo", {"fixed_shape": True}, {}),
        ("batch_invariant = False", "grpo", {"batch_invariant": True}, {}),
        (r"max_extra_bytes of at least \d+ .* got 250000", "grpo", {"max_extra_bytes": 250000}, {}),
        (r"a softcap of at least the temperature, 2\.0, got 1", "grpo", {"softcap": 1, "temperature": 2.0}, {}),
        ("a head without low_rank", "grpo", {}, {"low_rank": [LowRank(a=torch.ones(1, 16), b=torch.ones(129, 1))]}),
        ("a token_local attribute .* own depends on", own, {"reduction": TokenMean()}, {}),
        ("no parameters .* in Scaled", Scaled(), {"reduction": TokenMean()}, {}),
        ("room in one chunk for 9 tokens that the gradient of one .* it holds 8,", "gspo", {"chunk_tokens": 8}, {}),
        (
            "room in one chunk for 54 tokens that the gradient of one .* it holds 53,",
            "kl_cov",
            {"chunk_tokens": 53},
            {},
        ),
        (
            "room in one chunk for 54 tokens with weight_grad; it holds 50,",
            "grpo",
            {"chunk_tokens": 50},
            {"weight_grad": torch.zeros(129, 16)},
        ),
    ],
)
def test_what_one_pass_needs_is_named(message, loss_type, options, call, passes_taken):
    data = batch()
    data.columns["mask"][:] = True  # or a budget might be enough for those that count
    hidden, weight, bias = leaves_of(data)
    with Products() as products, pytest.raises(ValueError, match=f'passes="one" needs {message}'):
        FusedLinearGRPOLoss(loss_type, passes="one", **options)(
            hidden, weight, data.ids, bias=bias, **data.columns, **call
        )
    assert products.flops == 0
    step(FusedLinearGRPOLoss(loss_type, **options), data, **call)  # by itself it takes two
    assert not passes_taken


def test_float16_and_split_sequences_take_two_passes(passes_taken):
    data = batch(dtype=torch.float16)
    with pytest.raises(ValueError, match="bfloat16 or float32 products"):
        step(FusedLinearGRPOLoss("grpo", passes="one"), data)
    step(FusedLinearGRPOLoss("grpo"), data)
    data = batch(1, 9)
    columns = {name: c[0] if c.dim() == 2 else c.expand(9) for name, c in data.columns.items()}
    packed = data._replace(hidden=data.hidden[0], ids=data.ids[0], columns=columns)
    split = Segments(index=torch.zeros(9, dtype=torch.long), count=1, all_reduce=lambda sums: sums)
    with pytest.raises(ValueError, match="whole sequences on each rank"):
        step(FusedLinearGRPOLoss("gspo", passes="one"), packed, segments=split)
    step(FusedLinearGRPOLoss("gspo"), packed, segments=split)
    assert not passes_taken


@pytest.mark.parametrize("narrow", ["hidden", "weight"])
def test_float16_gradients_of_other_products_take_two_passes(narrow, passes_taken):
    """Autocast makes the products' dtype, not that of the gradients, which are rounded before the loss is scaled."""
    data = batch()
    data = data._replace(**{name: getattr(data, name).half() for name in (narrow, "bias")})
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ValueError, match="products and gradients"):
            step(FusedLinearGRPOLoss("grpo", passes="one"), data)
        step(FusedLinearGRPOLoss("grpo"), data)
        assert not passes_taken
        step(FusedLinearGRPOLoss("grpo"), data, frozen=(narrow, "bias"))
    assert passes_taken == [1]


def test_passes_is_one_of_three():
    with pytest.raises(ValueError, match=r"passes must be one of \['auto', 'one', 'two'\], got 'three'"):
        FusedLinearGRPOLoss("grpo", passes="three")


def test_what_auto_takes(passes_taken, monkeypatch):
    data = batch()
    step(FusedLinearGRPOLoss("grpo", passes="auto"), data)
    assert passes_taken == [1]
    step(FusedLinearGRPOLoss("grpo", passes="auto", chunk_tokens=8), data)
    step(FusedLinearGRPOLoss("grpo", passes="auto", chunk_vocab=8), data)
    step(FusedLinearGRPOLoss("grpo", passes="two"), data)
    assert passes_taken == [1]
    step(FusedLinearGRPOLoss("grpo"), data)
    assert passes_taken == [1, 1]
    passes_taken.pop()
    # 20 tokens a chunk: worth it if that counts as enough, and otherwise not.
    monkeypatch.setitem(choose.CHUNK_BYTES, "cpu", 20 * 4 * (VOCAB + 1 + HIDDEN))
    step(FusedLinearGRPOLoss("grpo", passes="auto"), data)
    assert passes_taken == [1]
    monkeypatch.setitem(choose.MIN_CHUNK_TOKENS, "cpu", 20)
    step(FusedLinearGRPOLoss("grpo", passes="auto", **EVERY_TOKEN), data)
    assert len(passes_taken) == 2
    assert passes_taken[1] > 1


def test_under_torch_compile_auto_takes_two_passes(passes_taken):
    data = batch()
    module = FusedLinearGRPOLoss("grpo", passes="auto")
    found = step(torch.compile(module, backend="eager"), data)
    assert not passes_taken
    assert_same(found, step(module, data))
    assert passes_taken == [1]


MIB = 1 << 20


@pytest.mark.parametrize(
    ("tokens", "vocab", "hidden_size", "needs_weight", "sum_dtype", "chunks", "extra_mib"),
    [
        (8192, 128256, 4096, True, torch.bfloat16, 1, 2150),
        (8192, 128256, 4096, False, None, 4, 540),
        (18000, 128256, 4096, True, torch.bfloat16, 2, 2400),
        (32768, 128256, 4096, True, torch.float32, 16, 2548),
        (8192, 151936, 2048, True, torch.bfloat16, 2, 1230),
        (8192, 256000, 2304, True, torch.bfloat16, 2, 2052),
    ],
)
def test_plans(tokens, vocab, hidden_size, needs_weight, sum_dtype, chunks, extra_mib):
    """Under 544 MiB, and 4 V H bytes with a 16-bit weight's gradient: a float32 sum, or larger chunks in its place."""
    shape = bfloat16_shape(tokens, vocab, hidden_size, "cuda", needs=(True, needs_weight))
    plan = choose.plan_one_pass(shape, "one")
    assert plan.sum_dtype == sum_dtype
    assert math.ceil(tokens / plan.chunk_tokens) == chunks
    per_token = Kept.bytes_per_token(vocab, torch.bfloat16, 256) + 4 * hidden_size
    sums = 4 * vocab * hidden_size * (sum_dtype == torch.float32)
    held = sums + per_token * plan.chunk_tokens
    room = 544 * MIB + needs_weight * 4 * vocab * hidden_size
    assert held <= min(extra_mib * MIB, room)
    assert held < plan.extra_bytes < 1.25 * room + 350 * MIB
    for live in (1, tokens // 9, tokens // 3, tokens - 1000):
        fewer = choose.plan_one_pass(shape, "one", tokens=live)
        assert fewer.extra_bytes <= plan.extra_bytes
