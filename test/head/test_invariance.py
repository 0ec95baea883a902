"""Bit for bit: two runs of every path, and with `batch_invariant` any company that a token is in."""

import math

import pytest
import torch
from torch import Tensor

from devices import NEEDS_GPU
from liger_rl import FusedLinearGRPOLoss, LogitTransform, LowRank, linear_logprobs, logits_logprobs
from liger_rl.head.engines.two_pass import INVARIANT_TOKENS

TOKENS, HIDDEN, VOCAB = 300, 96, 1003
EXTRAS = ("is_top1", "log_sum_sq_probs", "mean_logits")
DEVICES_AND_DTYPES = [
    pytest.param("cpu", torch.float32, id="cpu-float32"),
    pytest.param("cpu", torch.bfloat16, id="cpu-bfloat16"),
    pytest.param("cuda", torch.float32, id="cuda-float32", marks=NEEDS_GPU),
    pytest.param("cuda", torch.bfloat16, id="cuda-bfloat16", marks=NEEDS_GPU),
]


class Batch:
    def __init__(self, device: str, dtype: torch.dtype, *, tokens: int = TOKENS, vocab: int = VOCAB) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(tokens, HIDDEN, generator=generator).to(device, dtype)
        self.weight = torch.randn(vocab, HIDDEN, generator=generator).div_(4).to(device, dtype)
        self.bias = torch.randn(vocab, generator=generator).to(device, dtype)
        self.targets = torch.randint(vocab, (tokens,), generator=generator).to(device)

    def logprobs(self, tokens: Tensor | slice = slice(None), **options):
        """Of some of the tokens, in any order."""
        hidden, targets = self.hidden[tokens], self.targets[tokens]
        return linear_logprobs(hidden, self.weight, targets, bias=self.bias, batch_invariant=True, **options)


def assert_identical(found, expected, place=slice(None)) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            assert torch.equal(mine, other[place])


WANTED = {
    "logps": {},
    "entropy and extras": {"entropy": True, "extras": EXTRAS},
    "transform": {"transform": LogitTransform(temperature=0.7, softcap=5.0), "entropy": True},
    "fixed shape": {"fixed_shape": True, "entropy": True},
}


@pytest.mark.parametrize("options", WANTED.values(), ids=WANTED)
@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
def test_shuffled_padded_and_split(options, device, dtype):
    batch = Batch(device, dtype)
    whole = batch.logprobs(**options)
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(TOKENS, generator=generator).to(device)
    assert_identical(batch.logprobs(order, **options), whole, order)
    for sizes in ([1, 1, 2, 296], [127, 129, 44], [7] * 42 + [6]):
        for part in order.split(sizes)[:6]:
            assert_identical(batch.logprobs(part, **options), whole, part)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
def test_masked_and_padded_to_rows(device, dtype):
    batch = Batch(device, dtype)
    whole = batch.logprobs()
    for keep in (0.9, 0.3, 0.02):
        mask = (torch.rand(TOKENS, generator=torch.Generator().manual_seed(2)) < keep).to(device)
        found = batch.logprobs(mask=mask).logps
        assert torch.equal(found, torch.where(mask, whole.logps, 0.0))
    # (B, T) rows with padding of NaN
    hidden = torch.full((4, 100, HIDDEN), math.nan, dtype=dtype, device=device)
    targets = torch.full((4, 100), -100, device=device)
    for row, (start, length) in enumerate([(0, 3), (3, 97), (100, 100), (200, 100)]):
        hidden[row, 100 - length :] = batch.hidden[start : start + length]
        targets[row, 100 - length :] = batch.targets[start : start + length]
    padded = linear_logprobs(hidden, batch.weight, targets, bias=batch.bias, batch_invariant=True).logps
    assert torch.equal(padded[targets >= 0], whole.logps)


@NEEDS_GPU
def test_few_tokens_and_many_on_a_gpu():
    """On both sides of the number of tokens from which on the kernel of our own is worth it."""
    batch = Batch("cuda", torch.bfloat16, tokens=5000, vocab=20000)
    whole = batch.logprobs(entropy=True)
    for part in (slice(0, 1), slice(17, 300), slice(100, 613), slice(1000, 5000), torch.randperm(5000).cuda()):
        assert_identical(batch.logprobs(part, entropy=True), whole, part)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
def test_the_same_values_as_without(device, dtype):
    batch = Batch(device, dtype)
    hidden = batch.hidden.requires_grad_()
    plain = linear_logprobs(hidden, batch.weight, batch.targets, bias=batch.bias, entropy=True)
    found = batch.logprobs(entropy=True)
    grads = [torch.autograd.grad((out.logps + out.entropy).sum(), hidden)[0] for out in (plain, found)]
    torch.testing.assert_close(found.logps, plain.logps)
    torch.testing.assert_close(found.entropy, plain.entropy)
    torch.testing.assert_close(*grads)


def test_every_product_has_one_shape():
    """What the promise rests on where libraries multiply."""
    from torch.utils._python_dispatch import TorchDispatchMode

    shapes = set()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name == "aten::mm":
                shapes.add((*args[0].shape, args[1].shape[1]))
            return func(*args, **(kwargs or {}))

    batch = Batch("cpu", torch.float32)
    with Products():
        for tokens in (1, 77, 128, 300):
            batch.logprobs(slice(tokens))
    assert shapes == {(INVARIANT_TOKENS, HIDDEN, VOCAB)}


@NEEDS_GPU  # the interpreter multiplies with numpy, whose rows are not all treated alike
def test_tiles_of_our_own_kernel():
    """Where a row lies in its tile, and how many tiles there are, is nothing to it."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from liger_rl.kernels import epilogue

    device = "cuda"
    batch = Batch(device, torch.float16, tokens=200, vocab=600)

    def fold(tokens: Tensor):
        hidden, targets = batch.hidden[tokens], batch.targets[tokens]
        options = {"entropy": True, "extras": EXTRAS}
        return epilogue.gemm_fold(hidden, batch.weight, batch.bias, targets, LogitTransform(), **options)[0]

    whole = fold(torch.arange(200, device=device))
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1)).to(device)
    for part in (order, order[:70], order[150:]):
        assert_identical(fold(part), whole, part)


def test_no_token():
    batch = Batch("cpu", torch.float32)
    assert batch.logprobs(slice(0)).logps.shape == (0,)


def test_a_loss_takes_it():
    batch = Batch("cpu", torch.float32)
    loss = FusedLinearGRPOLoss("grpo", batch_invariant=True)
    reference = loss.reference_logps(batch.hidden, batch.weight, batch.targets, bias=batch.bias)
    assert torch.equal(reference[5:6], batch.logprobs(slice(5, 6)).logps)


def test_what_it_refuses():
    batch = Batch("cpu", torch.float32)
    for name in ("chunk_tokens", "chunk_vocab"):
        with pytest.raises(ValueError, match=f"{name} must be None with batch_invariant"):
            batch.logprobs(**{name: 64})
        with pytest.raises(ValueError, match=f"{name} must be None with batch_invariant"):
            FusedLinearGRPOLoss(batch_invariant=True, **{name: 64})
    with pytest.raises(ValueError, match=r"grad_tolerance must be 0\.0 with batch_invariant, got 0\.1"):
        batch.logprobs(grad_tolerance=0.1)
    term = LowRank(a=torch.zeros(2, HIDDEN), b=torch.zeros(VOCAB, 2))
    with pytest.raises(ValueError, match="low_rank must be empty with batch_invariant"):
        batch.logprobs(low_rank=[term])
    with pytest.raises(TypeError, match="batch_invariant must be a bool, got int"):
        linear_logprobs(batch.hidden, batch.weight, batch.targets, batch_invariant=1)


RUNS = {
    "default": {"entropy": True},
    "chunks": {"chunk_tokens": 100, "chunk_vocab": 300},
    "tolerance": {"grad_tolerance": 0.1},
    "low rank": {"low_rank": True},
    "fixed shape": {"fixed_shape": True, "entropy": True},
    "batch invariant": {"batch_invariant": True},
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
def test_two_runs(options, device, dtype):
    """Values and gradients of every path; on a GPU with tokens enough for the kernels of our own."""
    tokens = TOKENS if device == "cpu" else 1500
    batch = Batch(device, dtype, tokens=tokens)
    options = dict(options)
    if options.pop("low_rank", False):
        a, b = torch.ones(2, HIDDEN, device=device), torch.ones(VOCAB, 2, device=device)
        options["low_rank"] = [LowRank(a=a.requires_grad_(), b=b.requires_grad_())]
    mask = torch.arange(tokens, device=device) % 5 != 0
    slopes = torch.arange(tokens, device=device).remainder(7).float()
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        leaves = [t.detach().clone().requires_grad_() for t in (batch.hidden, batch.weight, batch.bias)]
        out = linear_logprobs(leaves[0], leaves[1], batch.targets, mask=mask, bias=leaves[2], **options)
        value = (out.logps * slopes).sum() + (0.0 if out.entropy is None else out.entropy.sum())
        leaves += [factor for term in options.get("low_rank", ()) for factor in (term.a, term.b)]
        runs.append([out.logps, *torch.autograd.grad(value, leaves)])
    assert_identical(*runs)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
def test_two_runs_from_logits(device, dtype):
    logits = torch.randn(60, VOCAB, generator=torch.Generator().manual_seed(0)).to(device, dtype).requires_grad_()
    targets = torch.arange(60, device=device)
    runs = []
    for _ in range(2):
        out = logits_logprobs(logits, targets, entropy=True)
        runs.append([*out[:2], *torch.autograd.grad((out.logps + out.entropy).sum(), logits)])
    assert_identical(*runs)
