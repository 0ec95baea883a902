"""grpo_loss_from_logits: layouts, clip indicators, and where the gradient goes."""

import pytest
import torch

from liger_rl import (
    FusedLinearGRPOLoss,
    PolicyBatch,
    PPOClip,
    TokenMean,
    grpo_loss_from_logits,
    logits_logprobs,
    ppo_loss_fn,
)
from liger_rl.given_logits import loss as logit_loss
from liger_rl.policy.presets import build_preset

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
    # A node between the leaf and the loss, as a model's head is, so that an in-place gradient is not the leaf itself.
    result = grpo_loss_from_logits(leaf * 1, ids, **columns, **({"beta": 0.1} | options))
    (result.loss * torch.linspace(0.5, 2, result.loss.numel(), device=ids.device).view_as(result.loss)).sum().backward()
    return result, leaf.grad


@pytest.mark.parametrize("loss_type", ["grpo", "gspo", "cispo", "sapo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_log_probs_and_policy_loss(loss_type, dtype, device):
    logits, ids, columns = problem(dtype, device)
    found, grad = solve(logits, ids, columns, loss_type=loss_type, compiled=False)
    leaf = logits.detach().requires_grad_()
    parts = build_preset(loss_type, beta=0.1)
    batch = PolicyBatch(completion_mask=columns["mask"], **{k: v for k, v in columns.items() if k != "mask"})
    logps = logits_logprobs(leaf[:, :-1], ids, mask=columns["mask"]).logps
    loss = ppo_loss_fn(logps, batch, parts.objective, None, kl=parts.kl).loss
    (loss * torch.linspace(0.5, 2, B * T, device=ids.device).view(B, T)).sum().backward()
    assert torch.equal(found.loss, loss)
    assert torch.equal(grad, leaf.grad)
    assert grad.dtype == dtype
    assert (grad[:, -1] == 0).all()
    assert (grad[:, :-1][~columns["mask"]] == 0).all()


def test_layouts_agree(device):
    logits, ids, columns = problem(device=device)
    extra, extra_grad = solve(logits, ids, columns)
    plain, plain_grad = solve(logits[:, :-1].contiguous(), ids, columns)
    packed_columns = {k: v.flatten() for k, v in columns.items() if k != "advantages"}
    packed_columns["advantages"] = columns["advantages"][:, None].expand(B, T).flatten()
    packed, packed_grad = solve(logits[:, :-1].reshape(B * T, V), ids.flatten(), packed_columns)
    for other in (plain, packed):
        for mine, theirs in zip(extra, other, strict=True):
            assert torch.equal(mine.flatten(), theirs.flatten())
    assert torch.equal(extra_grad[:, :-1], plain_grad)
    assert torch.equal(plain_grad.flatten(), packed_grad.flatten())


def test_in_place_and_buffer_give_the_same_gradient(device):
    logits, ids, columns = problem(torch.bfloat16, device)
    _, expected = solve(logits, ids, columns)
    _, in_place = solve(logits, ids, columns, in_place=True)
    assert torch.equal(in_place, expected)

    loss = grpo_loss_from_logits(logits.detach().clone().requires_grad_() * 1, ids, **columns, in_place=True).loss.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

    buffer = torch.full(logits.shape, 0.25, device=logits.device)
    leaf = logits.detach().clone().requires_grad_()
    result = grpo_loss_from_logits(leaf, ids, **columns, beta=0.1, grad_buffer=buffer)
    weights = torch.linspace(0.5, 2, B * T, device=ids.device).view(B, T)
    (result.loss * weights).sum().backward()
    assert leaf.grad is None
    single, single_grad = solve(logits.float(), ids, columns)
    torch.testing.assert_close(buffer - 0.25, single_grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(result.loss, single.loss)


def test_clip_indicators(device):
    logits, ids, columns = problem(device=device)
    found = {
        name: solve(logits, ids, columns, clip_indicator=name)[0].is_clipped for name in ("active", "range", "helion")
    }
    now = torch.log_softmax(logits[:, :-1].double(), -1).gather(-1, ids[..., None]).squeeze(-1)
    for name, indicator in found.items():
        assert indicator.any(), name
        for b in range(B):
            for t in range(T):
                ratio = (now[b, t] - columns["old_per_token_logps"][b, t]).exp().item()
                advantage = columns["advantages"][b].item()
                first, second = ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage
                expected = {"active": first > second, "range": not 0.8 <= ratio <= 1.2, "helion": first < second}
                assert indicator[b, t].item() == (expected[name] and bool(columns["mask"][b, t])), (name, b, t)


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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("clip_indicator", {"clip_indicator": "passive"}),
        ("grad_buffer", {"grad_buffer": torch.zeros(B, T, V)}),
        ("in_place", {"in_place": True, "grad_buffer": torch.zeros(B, T + 1, V)}),
        ("ref_per_token_logps", {"ref_per_token_logps": None}),
        ("temperature", {"temperature": 0.0}),
        ("epsilon", {"epsilon": 0.2}),
        ("reduction.*reduce what it returns", {"reduction": TokenMean()}),
        ("no option per_token", {"per_token": False}),
        ("entropy_coef", {"entropy_coef": 0.1}),
        ("clip_indicator", {"clip_indicator": ["active"]}),
        ("loss_type", {"loss_type": PPOClip()}),
        ("dro_beta", {"loss_type": "dro"}),
    ],
)
def test_bad_arguments_are_named(name, options):
    logits, ids, columns = problem()
    with pytest.raises(ValueError, match=name):
        grpo_loss_from_logits(logits, ids, **{**columns, "beta": 0.1, **options})


def test_other_policies_get_no_gradient(device, generated_here):
    """One kernel or many steps."""
    logits, ids, columns = problem(device=device)
    columns = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in columns.items()}
    for compiled in (True, False):
        leaf = logits.clone().requires_grad_()
        grpo_loss_from_logits(leaf, ids, **columns, beta=0.1, compiled=compiled).loss.sum().backward()
        assert leaf.grad.any()
        assert all(column.grad is None for column in columns.values())


GENERATED = {
    "grpo": {"beta": 0.1, "epsilon_high": 0.3},
    "bnpo": {"delta": 1.2, "dual_clip": 2.0},
    "cispo": {"beta": 0.1, "importance_weighted": True},
    "sapo": {},
    "gpg": {"beta": 0.1, "kl_estimator": "k2"},
    "dppo": {},
    "dppo_kl": {"divergence_high": 0.05},
    "dro": {"dro_beta": 0.3},
}


@pytest.fixture
def generated_here(monkeypatch, device):
    """Formulas as one graph, on CPU too: what is traced and differentiated, without a compiler at work."""
    if device.type == "cpu":
        monkeypatch.setattr(logit_loss, "DEVICES", ("cpu",))
        monkeypatch.setattr(logit_loss, "BACKEND", "aot_eager")
    logit_loss.generated.cache_clear()
    yield
    logit_loss.generated.cache_clear()


@pytest.mark.parametrize(("loss_type", "options"), GENERATED.items(), ids=GENERATED)
def test_formulas_in_one_kernel(loss_type, options, device, generated_here):
    logits, ids, columns = problem(device=device)
    columns["importance_ratio"] = torch.rand(B, T, device=device) + 0.5
    ids[1, 2] = -100
    found, step_by_step = (
        solve(logits, ids, columns, loss_type=loss_type, compiled=compiled, **({"beta": 0.0} | options))
        for compiled in (True, False)
    )
    assert logit_loss.generated.cache_info().misses == 1
    for mine, theirs in zip(found[0], step_by_step[0], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1], step_by_step[1], rtol=1e-6, atol=1e-7)
    assert found[1].any()


def test_one_kernel_takes_columns_of_any_layout(device, generated_here):
    logits, ids, columns = problem(device=device)
    columns.pop("ref_per_token_logps")
    given = [
        columns,
        {k: v for k, v in columns.items() if k != "old_per_token_logps"},
        {k: v for k, v in columns.items() if k != "mask"},
        columns | {"mask": columns["mask"].float(), "advantages": torch.randn(B, T, device=device)},
        columns | {"old_per_token_logps": columns["old_per_token_logps"].T.contiguous().T.bfloat16()},
    ]
    for batch in (*given, {k: v[:1] for k, v in columns.items()}):
        size = len(batch["advantages"])
        part, part_ids = logits[:size], ids[:size]
        found = solve(part, part_ids, batch, beta=0.0, clip_indicator="range")
        expected = solve(part, part_ids, batch, beta=0.0, clip_indicator="range", compiled=False)
        for mine, theirs in zip((*found[0], found[1]), (*expected[0], expected[1]), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    assert logit_loss.generated.cache_info().misses == 1


def test_one_kernel_refuses_what_the_steps_refuse(device, generated_here):
    logits, ids, columns = problem(device=device)
    outside = ids.clone()
    outside[0, 0] = V
    for gradient in (True, False):
        with (
            torch.set_grad_enabled(gradient),
            pytest.raises(ValueError, match=r"1 of them are not, the largest is 131"),
        ):
            solve(logits, outside, columns)
    masked = solve(logits, outside, columns, fixed_shape=True)
    assert masked[0].loss[0, 0] == 0
    assert (masked[1][0, 0] == 0).all()
    with pytest.raises(ValueError, match="ref_per_token_logps must be given"):
        solve(logits, ids, columns | {"ref_per_token_logps": None})
    with pytest.raises(ValueError, match="old_per_token_logps must be"):
        solve(logits, ids, columns | {"old_per_token_logps": torch.zeros(B, T + 1, device=device)})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("fixed_shape", [True, False])
def test_ids_of_a_dtype_that_does_not_hold_the_vocabulary_size(dtype, compiled, fixed_shape, device, generated_here):
    logits, ids, columns = problem(device=device)
    logits = torch.cat([logits] * 600, -1) if dtype == torch.int16 else torch.cat([logits] * 2, -1)
    options = {"compiled": compiled, "fixed_shape": fixed_shape}
    ids = ids.clamp(max=127)
    found, expected = (solve(logits, of, columns, **options) for of in (ids.to(dtype), ids))
    assert torch.equal(found[0].loss, expected[0].loss)
    assert torch.equal(found[1], expected[1])


@torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True)
def test_losses_do_not_share_a_limit_of_compilations(device, generated_here):
    """torch.compile gives a function up after a few; as many losses as there are get a graph each."""
    logits, ids, columns = problem(device=device)
    for step in range(3):
        options = {"epsilon_high": 0.05 * step}
        found = solve(logits, ids, columns, **options)[0].loss
        torch.testing.assert_close(found, solve(logits, ids, columns, compiled=False, **options)[0].loss)
    assert logit_loss.generated.cache_info().misses == 3


@pytest.mark.parametrize("compiled", [True, False])
def test_errors_speak_of_the_callers_arguments(compiled, device, generated_here):
    logits, ids = torch.randn(3, 5, 40, device=device), torch.zeros(3, 5, dtype=torch.long, device=device)
    advantages = torch.ones(3, device=device)
    with pytest.raises(ValueError, match="selected_token_ids must be token ids"):
        grpo_loss_from_logits(logits, ids + 40, advantages, compiled=compiled)
    with pytest.raises(ValueError, match="mask must be 0 or 1"):
        grpo_loss_from_logits(logits, ids, advantages, torch.full((3, 5), 0.5, device=device), compiled=compiled)
    for name in ("in_place", "fixed_shape", "compiled"):
        with pytest.raises(TypeError, match=name):
            grpo_loss_from_logits(logits, ids, advantages, **{"compiled": compiled, name: 1})


@pytest.mark.parametrize("passes", ["one", "two"])
def test_errors_of_the_fused_loss_speak_of_its_arguments(passes, device):
    loss = FusedLinearGRPOLoss("grpo", passes=passes)
    hidden, weight = torch.randn(3, 5, 8, device=device, requires_grad=True), torch.randn(40, 8, device=device)
    ids, advantages = torch.zeros(3, 5, dtype=torch.long, device=device), torch.ones(3, device=device)
    with pytest.raises(ValueError, match="selected_token_ids must be token ids"):
        loss(hidden, weight, ids + 40, advantages)
    with pytest.raises(ValueError, match="mask must be 0 or 1"):
        loss(hidden, weight, ids, advantages, torch.full((3, 5), 0.5, device=device))
    with pytest.raises(ValueError, match="selected_token_ids must be token ids"):
        loss.reference_logps(hidden, weight, ids + 40)
    with pytest.raises(ValueError, match=r"selected_token_ids must be \(B, T\)"):
        loss.reference_logps(hidden, weight, ids[:, 1:])
