"""grpo_loss_from_logits: layouts, the clip indicator, and the kernel of the loss."""

import math

import pytest
import torch

from head_calls import run_pytorch, run_triton
from liger_rl.fused_linear import grpo_loss_from_logits
from liger_rl.kernels.devices import runs_triton
from liger_rl.losses import PolicyBatch

B, T, V = 4, 9, 131


def problem(dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(B, T + 1, V, generator=generator) * 2).to(device, dtype)
    ids = torch.randint(0, V, (B, T), generator=generator).to(device)
    now = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[..., None]).squeeze(-1)
    noise = torch.randn(2, B, T, generator=generator).to(device) * 0.3
    lengths = torch.tensor([9, 4, 1, 6], device=device)
    columns = {
        "old_per_token_logps": now + noise[0],
        "ref_per_token_logps": now + noise[1],
        "advantages": torch.tensor([1.0, -0.7, 0.4, -1.3], device=device),
        "mask": torch.arange(T, device=device) < lengths[:, None],
    }
    return logits, ids, columns


def solve(logits, ids, columns, **options):
    leaf = logits.detach().clone().requires_grad_()
    result = grpo_loss_from_logits(leaf, ids, **columns, **({"beta": 0.1} | options))
    (result.loss * torch.linspace(0.5, 2, result.loss.numel(), device=ids.device).view_as(result.loss)).sum().backward()
    return result, leaf.grad


def solve_by_formulas(*given, **options):
    with pytest.MonkeyPatch.context() as patch:
        run_pytorch(patch, given[0].device)
        return solve(*given, **options)


@pytest.fixture
def kernel(monkeypatch):
    """The kernel of the loss also where Triton's interpreter runs it."""
    if not torch.cuda.is_available():
        run_triton(monkeypatch)


def test_clip_indicator(device, kernel):
    logits, ids, columns = problem(device=device)
    result, _ = solve(logits, ids, columns)
    assert (result.loss.grad_fn.name() == "_LaunchBackward") == runs_triton(device)
    now = torch.log_softmax(logits[:, :-1].double(), -1).gather(-1, ids[..., None]).squeeze(-1)
    assert result.is_clipped.any()
    for b in range(B):
        for t in range(T):
            ratio = (now[b, t] - columns["old_per_token_logps"][b, t]).exp().item()
            advantage = columns["advantages"][b].item()
            is_cut = ratio * advantage > min(max(ratio, 0.8), 1.2) * advantage
            assert result.is_clipped[b, t].item() == (is_cut and bool(columns["mask"][b, t])), (b, t)


def test_agrees_with_an_independent_triton_kernel(device):
    liger = pytest.importorskip("liger_kernel.transformers.grpo_loss")
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("with a GPU its kernel is compiled, and takes no CPU tensors")
    logits, ids, columns = problem(device=device)
    found, grad = solve(logits, ids, columns, temperature=0.8, epsilon_high=0.3)
    leaf = logits.detach().clone().requires_grad_()
    theirs = liger.triton_grpo_loss(
        leaf * 1, columns["old_per_token_logps"], columns["ref_per_token_logps"], ids, columns["advantages"],
        columns["mask"].float(), temperature=0.8, beta=0.1, eps_low=0.2, eps_high=0.3, inplace=False, loss_type="grpo",
    )  # fmt: skip
    weights = torch.linspace(0.5, 2, B * T, device=ids.device).view(B, T)
    (torch.where(columns["mask"], theirs[0], 0.0) * weights).sum().backward()
    for mine, other in zip(found, theirs, strict=True):
        torch.testing.assert_close(mine.float(), torch.where(columns["mask"], other, 0.0).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad, leaf.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "dppo_kl"])
def test_other_policies_get_no_gradient(loss_type, device, kernel):
    """One kernel or many steps."""
    logits, ids, columns = problem(device=device)
    columns = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in columns.items()}
    leaf = logits.clone().requires_grad_()
    grpo_loss_from_logits(leaf, ids, **columns, loss_type=loss_type, beta=0.1).loss.sum().backward()
    assert leaf.grad.any()
    assert all(column.grad is None for column in columns.values())


def assert_near(found, expected):
    """Results and gradients of `solve`."""
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-7, equal_nan=True)


def test_one_kernel_takes_columns_of_any_layout(device, kernel):
    logits, ids, columns = problem(device=device)
    columns.pop("ref_per_token_logps")
    given = [
        columns,
        {k: v for k, v in columns.items() if k != "old_per_token_logps"},
        {k: v for k, v in columns.items() if k != "mask"},
        columns | {"mask": columns["mask"].float(), "advantages": torch.randn(B, T, device=device)},
        columns | {"old_per_token_logps": columns["old_per_token_logps"].T.contiguous().T.bfloat16()},
        columns | {"advantages": torch.tensor([1, -2, 0, 3], device=device)},
        {k: torch.where(columns["mask"], v, math.nan) if v.shape == (B, T) and k != "mask" else v
         for k, v in columns.items()},
    ]  # fmt: skip
    for batch in (*given, {k: v[:1] for k, v in columns.items()}):
        size = len(batch["advantages"])
        found, expected = (by(logits[:size], ids[:size], batch, beta=0.0) for by in (solve, solve_by_formulas))
        assert_near(found, expected)


@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_in_a_row_that_counts(garbage, device, kernel):
    logits, ids, columns = problem(device=device)
    logits[0, 0, :] = garbage
    logits[3, 1, 7] = garbage
    logits[1, 6] = garbage  # masked
    found, expected = (by(logits, ids, columns) for by in (solve, solve_by_formulas))
    assert found[0].loss[0, 0].isnan()
    assert found[0].loss[1].isfinite().all()
    assert_near(found, expected)


def test_a_whole_batch(device, kernel):
    logits, ids, columns = problem(device=device)
    named = {k: v for k, v in columns.items() if k != "mask"}
    batch = PolicyBatch(mask=columns["mask"], num_items_in_batch=7, **named)
    for loss_type in ("grpo", "gspo"):
        found, expected = (grpo_loss_from_logits(logits, ids, **given, loss_type=loss_type, beta=0.1)
                           for given in ({"advantages": batch}, columns))  # fmt: skip
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    with pytest.raises(TypeError, match="mask, old_per_token_logps must be in the PolicyBatch that grpo_loss_from_log"):
        grpo_loss_from_logits(logits, ids, batch, columns["mask"], old_per_token_logps=columns["old_per_token_logps"])
    with pytest.raises(ValueError, match="no option num_items_in_batch"):
        grpo_loss_from_logits(logits, ids, **columns, num_items_in_batch=7)


def test_one_kernel_refuses_what_the_steps_refuse(device, kernel):
    logits, ids, columns = problem(device=device)
    outside = ids.clone()
    outside[0, 0] = V
    for gradient in (True, False):
        with (
            torch.set_grad_enabled(gradient),
            pytest.raises(ValueError, match=r"1 of them are not, the largest is 131"),
        ):
            solve(logits, outside, columns)
    with pytest.raises(ValueError, match="ref_per_token_logps must be given"):
        solve(logits, ids, columns | {"ref_per_token_logps": None})
    with pytest.raises(ValueError, match="old_per_token_logps must be"):
        solve(logits, ids, columns | {"old_per_token_logps": torch.zeros(B, T + 1, device=device)})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
@pytest.mark.parametrize("loss_type", ["grpo", "dppo_kl"])
def test_ids_of_a_dtype_that_does_not_hold_the_vocabulary_size(dtype, loss_type, device, kernel):
    logits, ids, columns = problem(device=device)
    # One sequence, since each logit of a vocabulary beyond int16 takes time in Triton's interpreter.
    logits, ids, columns = logits[:1], ids[:1], {name: column[:1] for name, column in columns.items()}
    logits = torch.cat([logits] * 251, -1) if dtype == torch.int16 else torch.cat([logits] * 2, -1)
    assert logits.shape[-1] > torch.iinfo(dtype).max
    ids = ids.clamp(max=127)
    found, expected = (solve(logits, of, columns, loss_type=loss_type) for of in (ids.to(dtype), ids))
    assert torch.equal(found[0].loss, expected[0].loss)
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("loss_type", ["grpo", "dppo_kl"])
def test_errors_speak_of_the_callers_arguments(loss_type, device, kernel):
    logits, ids = torch.randn(3, 5, 40, device=device), torch.zeros(3, 5, dtype=torch.long, device=device)
    advantages, mask = torch.ones(3, device=device), torch.full((3, 5), 0.5, device=device)
    with pytest.raises(ValueError, match="selected_token_ids must be token ids"):
        grpo_loss_from_logits(logits, ids + 40, advantages, loss_type=loss_type)
    with pytest.raises(ValueError, match="mask must be 0 or 1"):
        grpo_loss_from_logits(logits, ids, advantages, mask, loss_type=loss_type)
