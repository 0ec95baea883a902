"""The drop-in for liger-kernel's distillation loss against liger-kernel itself, in float64 too, and what it refuses."""

import pytest
import torch

pytest.importorskip("liger_kernel.chunked_loss", reason="the integration needs liger-kernel")

from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDLoss as THEIRS

import oracles
from head_calls import Products
from liger_rl.integrations.liger import LigerFusedLinearJSDLoss

SIZES = (12, 20, 61)  # H, H', V
LEAVES = ("student_input", "student_weight", "student_bias")


def problem(shape=(23,), dtype=torch.float32, device="cpu", *, ignored=-100, bias=True):
    generator = torch.Generator().manual_seed(2)
    hidden, teacher_hidden, vocab = SIZES

    def random(*size):
        return torch.randn(*size, generator=generator)

    call = {
        "student_input": random(*shape, hidden),
        "student_weight": random(vocab, hidden) / hidden**0.5,
        "teacher_input": random(*shape, teacher_hidden),
        "teacher_weight": random(vocab, teacher_hidden) / teacher_hidden**0.5,
        "student_bias": random(vocab) if bias else None,
        "teacher_bias": random(vocab) if bias else None,
    }
    call = {name: None if part is None else part.to(device, dtype) for name, part in call.items()}
    labels = torch.randint(vocab, shape, generator=generator)
    labels.view(-1)[::4] = ignored
    return call | {"true_labels": labels.to(device)}


def run(loss_class, options, call, factor=1.0):
    leaves = {name: call[name].detach().clone().requires_grad_() for name in LEAVES if call[name] is not None}
    result = loss_class(**{"compiled": False, **options})(**{**call, **leaves})
    loss, *parts = result if isinstance(result, tuple) else (result,)
    return loss.detach(), torch.autograd.grad(loss * factor, list(leaves.values())), [part.detach() for part in parts]


def assert_same(result, expected, rtol=1e-5):
    torch.testing.assert_close(result[0], expected[0], rtol=rtol, atol=rtol / 10)
    for mine, theirs in zip(result[1], expected[1], strict=True):
        assert theirs.any()
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol * theirs.abs().max().item())
    torch.testing.assert_close(result[2], expected[2], rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.0, 1.0), (1.7, 0.0), (-0.2, 0.9)])
@pytest.mark.parametrize("temperature", [1.0, 1.8])
def test_same_numbers(beta, weights, temperature, device):
    """Whole and in parts, over several of Liger's chunks; a label that is ignored may be an id."""
    for more in ({}, {"return_soft_hard_loss": True, "ignore_index": 7}):
        options = {"weight_hard_loss": weights[0], "weight_soft_loss": weights[1], "beta": beta, **more}
        options |= {"temperature": temperature, "chunk_size": 5}
        call = problem(device=device, ignored=options.get("ignore_index", -100))
        result, expected = (run(loss, options, call, factor=3.0) for loss in (LigerFusedLinearJSDLoss, THEIRS))
        assert_same(result, expected)
        assert len(result[2]) == (2 if more else 0)


def test_other_shapes_no_bias_and_nothing_that_counts():
    for call in (problem((3, 5)), problem(bias=False), problem((6,)) | {"true_labels": torch.full((6,), -100)}):
        result, expected = (run(loss, {}, call) for loss in (LigerFusedLinearJSDLoss, THEIRS))
        if (call["true_labels"] == -100).all():
            assert result[0] == expected[0] == 0
            assert not any(grad.any() for grad in result[1])
        else:
            assert_same(result, expected)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"weight_hard_loss": 0.0, "beta": 0.1}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_no_further_from_float64_than_theirs(options, dtype):
    call = problem((96,), dtype)
    wide = {name: part.double() if isinstance(part, torch.Tensor) else part for name, part in call.items()}
    truth = run(THEIRS, options, wide | {"true_labels": call["true_labels"]})
    result, theirs = (run(loss, options, call) for loss in (LigerFusedLinearJSDLoss, THEIRS))
    assert abs(result[0] - truth[0]) < 1e-5
    for mine, other, gold in zip(result[1], theirs[1], truth[1], strict=True):
        assert oracles.norm_error(mine, gold) <= oracles.norm_budget(other, gold, dtype)


@pytest.mark.parametrize(("options", "units"), [({}, 3), ({"weight_hard_loss": 0.0}, 3), ({"temperature": 2.0}, 7)])
def test_products(options, units):
    """One pass, of the tokens that count; a hard loss at another temperature takes two passes of the student's head."""
    call = problem(bias=False)
    with Products() as products:
        run(LigerFusedLinearJSDLoss, options, call)
    hidden, teacher_hidden, vocab = SIZES
    tokens = int((call["true_labels"] != -100).sum())
    assert products.flops == tokens * 2 * vocab * (units * hidden + teacher_hidden)
    with Products() as products, torch.no_grad():
        LigerFusedLinearJSDLoss(compiled=False)(**call)
    assert products.flops == tokens * 2 * vocab * (hidden + teacher_hidden)


def test_zero3_parameters_are_kept_for_a_second_pass():
    """DeepSpeed empties them behind the forward; its id marks them."""
    call = problem(dtype=torch.float16)
    truth = run(LigerFusedLinearJSDLoss, {}, call)
    leaves = {name: call[name].clone().requires_grad_() for name in LEAVES}
    for part in (leaves["student_weight"], leaves["student_bias"], call["teacher_weight"], call["teacher_bias"]):
        part.ds_id = 1
    loss = LigerFusedLinearJSDLoss()(**{**call, **leaves})
    for part in (leaves["student_weight"], leaves["student_bias"], call["teacher_weight"], call["teacher_bias"]):
        part.data.zero_()
    loss.backward()
    torch.testing.assert_close([part.grad for part in leaves.values()], list(truth[1]), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "changed", "error", "message"),
    [
        ({"beta": 1.5}, {}, ValueError, r"beta must be in \[0, 1\]"),
        ({"temperature": 0.0}, {}, ValueError, "temperature must be"),
        ({"weight_hard_loss": float("inf")}, {}, ValueError, r"weight_hard_loss must be in \(-inf, inf\)"),
        ({"weight_soft_loss": "half"}, {}, TypeError, "weight_soft_loss must be a number"),
        ({}, {"teacher_weight": torch.zeros(70, 20)}, ValueError, "teacher_weight must have the 61 .*to padding"),
        ({}, {"true_labels": torch.zeros(22, dtype=torch.int64)}, ValueError, "true_labels must be integers of shape"),
        ({}, {"true_labels": torch.zeros(23)}, ValueError, "true_labels must be integers of shape"),
        ({}, {"true_labels": torch.full((23,), 61)}, ValueError, "true_labels must be token ids"),
        ({}, {"true_labels": torch.full((23,), -1)}, ValueError, "true_labels must be token ids"),
        ({}, {"teacher_input": torch.zeros(22, 20)}, ValueError, "teacher_hidden must have the tokens"),
        ({}, {"student_weight": None}, TypeError, "student_weight must be a tensor"),
    ],
)
def test_bad_input(options, changed, error, message):
    call = problem() | ({"teacher_bias": None} if "teacher_weight" in changed else {})
    with pytest.raises(error, match=message):
        LigerFusedLinearJSDLoss(**options)(**{**call, **changed})
