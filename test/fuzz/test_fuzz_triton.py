"""The other files' calls with Triton's kernels, in its interpreter where there is no GPU."""

from dataclasses import replace

import pytest
import test_fuzz_head as heads
import test_fuzz_losses as losses
import torch
from hypothesis import given

import oracle
from cases import (
    HeadCase,
    LogitsCase,
    PolicyCase,
    fused_cases,
    fuzz,
    given_logits_cases,
    head_cases,
    logits_cases,
    several_cases,
    support_cases,
)
from devices import skip_where_misread
from head_calls import in_short_pieces, run_triton
from liger_rl import FusedLinearGRPOLoss, linear_logprobs, support_logprobs
from liger_rl.kernels import epilogue
from liger_rl.kernels.limits import LIMITS
from liger_rl.support import Support


def is_for_the_interpreter(case) -> bool:
    """It runs one program after the other, and truncates to bfloat16 where the compiler rounds."""
    of_head = case
    if isinstance(case, PolicyCase):
        of_head = case.logits if case.head is None else case.head
    tokens, columns = of_head.options.get("chunk_tokens"), of_head.options.get("chunk_vocab")
    small = of_head.targets.numel() <= 12 and (tokens is None or tokens >= 7) and (columns is None or columns >= 64)
    if isinstance(of_head, LogitsCase):  # no kernel takes a single column that has no stride
        return small and of_head.logits.dtype != torch.bfloat16 and of_head.logits.shape[-1] > 1
    return small and of_head.compute != torch.bfloat16


def check_of(case):
    if isinstance(case, LogitsCase):
        return heads.test_logits_logprobs
    if isinstance(case, PolicyCase):
        return losses.test_grpo_loss_from_logits if case.head is None else losses.test_fused_loss
    if case.support is not None:
        return heads.test_support_logprobs
    return heads.test_linear_logprobs if case.ids is None else heads.test_several_targets


def in_float16(case: HeadCase) -> HeadCase:
    """One whose products have an epilogue: 16-bit matrices with rows of whole 16 bytes, and no tile named."""

    def padded(x: torch.Tensor) -> torch.Tensor:
        # A copy, because one row counts as contiguous, whatever its stride is.
        return torch.nn.functional.pad(x.clone(memory_format=torch.contiguous_format), (0, -x.shape[-1] % 8))

    def half(x: torch.Tensor) -> torch.Tensor:
        return x if x.dtype == torch.float32 else x.half()

    options = {name: value for name, value in case.options.items() if "chunk" not in name}
    return replace(
        case, hidden=padded(case.hidden).half(), weight=padded(case.weight).half(),
        bias=None if case.bias is None else half(case.bias), autocast=None, compute_dtype=None, options=options,
    )  # fmt: skip


KINDS = {"head": head_cases(), "listed ids": support_cases(), "several targets": several_cases()}
KINDS |= {"logits": logits_cases(), "loss": fused_cases(), "loss of logits": given_logits_cases()}
EPILOGUE = "products with an epilogue"
KINDS[EPILOGUE] = head_cases().map(in_float16)
# Of all cases; there are more of the kinds whose cases are short.
SHARES = {"listed ids": 0.008, "loss of logits": 0.1, EPILOGUE: 0.04}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other files run Triton's kernels where there is a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_in_triton(kind) -> None:
    if kind == EPILOGUE:
        skip_where_misread(1)  # a tile of gradients has any number of columns

    @fuzz(SHARES.get(kind, 0.015))
    @given(case=KINDS[kind].filter(is_for_the_interpreter))
    def check(case) -> None:
        check_of(case).hypothesis.inner_test(case)

    with pytest.MonkeyPatch.context() as patch:
        run_triton(patch, epilogue=kind == EPILOGUE)
        patch.setattr(LIMITS, "statistics_bytes", 1)  # more than one chunk of statistics
        patch.setattr(epilogue, "TILE_VOCAB", 64)
        in_short_pieces(patch)
        patch.setattr(oracle, "TRITON", True)
        check()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other files run Triton's kernels where there is a GPU")
def test_id_0_counts(monkeypatch) -> None:
    """The fuzzer seldom draws it for a token whose result it compares."""
    run_triton(monkeypatch)
    hidden, weight = torch.randn(3, 8), torch.randn(40, 8)
    logps = linear_logprobs(hidden, weight, torch.zeros(3, dtype=torch.int64)).logps
    torch.testing.assert_close(logps, (hidden @ weight.T).log_softmax(-1)[:, 0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other files run Triton's kernels where there is a GPU")
def test_mean_logits_have_a_gradient(monkeypatch) -> None:
    """The fuzzer seldom draws them for a head whose tiles of logits a kernel differentiates."""
    run_triton(monkeypatch)
    hidden, weight = torch.randn(3, 8, requires_grad=True), torch.randn(40, 8)
    values = linear_logprobs(hidden, weight, torch.arange(3), extras=["mean_logits"])
    (grad,) = torch.autograd.grad((values.logps + 2.0 * values.mean_logits).sum(), hidden)
    logits = hidden @ weight.T
    expected = logits.log_softmax(-1)[range(3), range(3)] + 2.0 * logits.mean(-1)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), hidden)[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other files run Triton's kernels where there is a GPU")
def test_segments_in_several_pieces(monkeypatch) -> None:
    """The fuzzer seldom draws rows of more ids, and ids of more rows, than a piece has, beside an empty row."""
    run_triton(monkeypatch)
    in_short_pieces(monkeypatch)
    leaves = hidden, weight = torch.randn(12, 8, requires_grad=True), torch.randn(12, 8, requires_grad=True)
    ids = torch.stack([torch.randperm(12)[:10] for _ in range(12)])
    listed, targets = torch.zeros(12, 12, dtype=torch.bool).scatter(1, ids, True), ids[:, 0].clone()
    ids[3], listed[3] = -1, True
    logps = support_logprobs(hidden, weight, targets, Support.from_padded(ids)).logps
    expected = (hidden @ weight.T).masked_fill(~listed, -torch.inf).log_softmax(-1)[range(12), targets]
    torch.testing.assert_close(logps, expected)
    slope = torch.randn(12)
    grads = (torch.autograd.grad((values * slope).sum(), leaves) for values in (logps, expected))
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other files run Triton's kernels where there is a GPU")
def test_k3_has_a_gradient(monkeypatch) -> None:
    """The fuzzer seldom draws it for a loss that the kernel runs."""
    run_triton(monkeypatch)
    hidden, weight, ids = torch.randn(2, 3, 8, requires_grad=True), torch.randn(40, 8), torch.arange(6).view(2, 3)
    advantages, ref = torch.randn(2), -4 * torch.rand(2, 3)
    loss = FusedLinearGRPOLoss("dapo", beta=0.5)(hidden, weight, ids, advantages, ref_per_token_logps=ref).loss
    logps = (hidden @ weight.T).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    ratio, k3 = (logps - logps.detach()).exp(), (ref - logps).exp() - (ref - logps) - 1
    expected = (0.5 * k3 - ratio * advantages[:, None]).mean()
    torch.testing.assert_close(loss, expected)
    grads = (torch.autograd.grad(value, hidden) for value in (loss, expected))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
