"""TRL's distillation on our divergence: the loss against TRL's own. Whole runs: test_trl_runs.py."""

import inspect
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("trl", "1.16", reason="TRL 1.16 is not installed")
pytest.importorskip("peft", reason="PEFT is not installed")

import trl.trainer.distillation_trainer as module
import trl.trainer.utils as trl_utils

import oracles
import trl_runs
from head_calls import Products
from liger_rl.integrations.trl import distillation
from liger_rl.integrations.trl.distillation import LOSS
from liger_rl.integrations.trl.distillation import _chunked_divergence_loss as patched_loss

THEIR_LOSS = vars(module)[LOSS]
STUDENT = ("student_hidden_states", "student_lm_head_weight", "student_lm_head_bias")
H, TEACHER_H, VOCAB = 32, 48, 301


def loss_call(dtype=torch.float32, device="cpu", *, mask=None, bias=True):
    generator = torch.Generator().manual_seed(3)

    def random(*size, scale=1.0):
        return (torch.randn(*size, generator=generator) * scale).to(device, dtype)

    return {
        "student_hidden_states": random(3, 9, H),
        "teacher_hidden_states": random(3, 9, TEACHER_H),
        "student_lm_head_weight": random(VOCAB, H, scale=0.2),
        "teacher_lm_head_weight": random(VOCAB, TEACHER_H, scale=0.2),
        "completion_mask": (torch.arange(9) < torch.tensor([[9], [4], [0]])).to(device) if mask is None else mask,
        "student_lm_head_bias": random(VOCAB) if bias else None,
        "teacher_lm_head_bias": random(VOCAB) if bias else None,
    }


def solve_loss(loss, call, **options):
    """-> the three results, and the student's gradients of 3 times the loss."""
    leaves = {name: call[name].clone().requires_grad_() for name in STUDENT if call[name] is not None}
    total, entropy, count = loss(**{**call, **leaves, **options})
    assert not entropy.requires_grad
    return total, entropy, count, *torch.autograd.grad(3 * total, list(leaves.values()))


def test_the_loss_has_trls_signature():
    ours, theirs = (inspect.signature(loss).parameters for loss in (patched_loss, THEIR_LOSS))
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


@pytest.mark.parametrize(
    ("beta", "items", "bias", "options"),
    [
        (0.0, None, True, {}),
        (0.3, 7, False,
         {"temperature": 0.7, "student_logit_scale": 1.3, "student_final_logit_softcapping": 3.0}),
        (1.0, torch.tensor(52.0), True,
         {"temperature": 1.6, "teacher_logit_scale": 0.5, "teacher_final_logit_softcapping": 2.0}),
    ],
)  # fmt: skip
def test_the_loss_agrees_with_trls(beta, items, options, bias, device):
    call = loss_call(device=device, bias=bias)
    options = {"beta": beta, "num_items_in_batch": items, **options}
    mine, theirs = (solve_loss(loss, call, **options) for loss in (patched_loss, THEIR_LOSS))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_float32_tensors_under_autocast(beta, device):
    call = loss_call(device=device)
    with torch.autocast(device.type, torch.bfloat16):
        mine, theirs = (solve_loss(loss, call, beta=beta) for loss in (patched_loss, THEIR_LOSS))
    torch.testing.assert_close(mine, theirs, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_without_tokens(dtype):
    """It makes no float32 gradient."""
    call = loss_call(dtype, mask=torch.zeros(3, 9, dtype=torch.int64))
    for items in (None, torch.tensor(5)):
        with Products() as products:
            mine = solve_loss(patched_loss, call, beta=0.5, num_items_in_batch=items)
        assert {made for shape, made in products.made if shape == (VOCAB, H)} == {dtype}
        theirs = solve_loss(THEIR_LOSS, call, beta=0.5, num_items_in_batch=items)
        assert not any(value.any() for value in (*mine, *theirs))


def test_16_bit_heads_are_no_further_from_float64_than_trls():
    call = loss_call(torch.bfloat16)
    wide = {name: None if part is None else part.double() for name, part in call.items()}
    truth = solve_loss(THEIR_LOSS, wide | {"completion_mask": call["completion_mask"]}, beta=0.5)
    mine, theirs = (solve_loss(loss, call, beta=0.5) for loss in (patched_loss, THEIR_LOSS))
    assert abs(mine[0] - truth[0]) < 1e-5
    for ours, eager, gold in zip(mine[3:], theirs[3:], truth[3:], strict=True):
        assert oracles.norm_error(ours, gold) <= oracles.norm_budget(eager, gold, torch.bfloat16)


def test_the_loss_makes_its_gradients_in_the_forward():
    """Where nothing stands in the way; of the tokens that count alone."""
    call = loss_call(bias=False)
    with Products() as products:
        solve_loss(patched_loss, call, beta=0.5)
    tokens = int(call["completion_mask"].sum())
    assert products.flops == tokens * 2 * VOCAB * (3 * H + TEACHER_H)
    with Products() as products, torch.no_grad():
        patched_loss(**call, beta=0.0)
    assert products.flops == tokens * 2 * VOCAB * (H + TEACHER_H)


@pytest.mark.parametrize(("dtype", "entries"), [(torch.float32, 2), (torch.bfloat16, 4)])
def test_heads_that_are_whole_inside_of_trls_context_alone(dtype, entries, monkeypatch):
    """As under ZeRO-3, which empties them again, and enters the context on all ranks together. In one pass the forward
    alone needs them. Whether a 16-bit head takes it depends on a rank's tokens elsewhere, and here it does not.
    """
    call, whole, entered = loss_call(dtype), {}, []
    expected = solve_loss(patched_loss, call, beta=0.5)

    @contextmanager
    def gather(*parameters):
        entered.append(parameters)
        for part in parameters:
            part.data.copy_(whole[id(part)])
        yield
        for part in parameters:
            part.data.fill_(torch.nan)

    monkeypatch.setattr(trl_utils, "maybe_gather_lm_head_ctx", gather)
    for part in (call[f"{side}_lm_head_{part}"] for side in ("student", "teacher") for part in ("weight", "bias")):
        whole[id(part)], part.ds_id = part.clone(), 0
        part.fill_(torch.nan)
    leaves = [call[name].requires_grad_() for name in STUDENT]
    results = patched_loss(**call, beta=0.5)
    gradients = torch.autograd.grad(3 * results[0], leaves)
    assert len(entered) == entries
    if dtype == torch.float32:
        torch.testing.assert_close((*results, *gradients), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, 0),
        ({"prepare": lambda trainer: trainer.model.lm_head.requires_grad_(False)}, 2),
        ({"gradient_accumulation_steps": 1}, 1),
    ],
    ids=["a trained head", "a frozen head", "one micro-batch"],
)
def test_a_window_keeps_no_gradient_of_a_head_for_each_micro_batch(options, calls, path_of, tmp_path, monkeypatch):
    one_pass, in_one_pass = distillation.compute_in_one_pass_if_free, []

    def count(*args):
        result, loss = one_pass(*args)
        in_one_pass.extend([] if loss is None else [loss])
        return result, loss

    monkeypatch.setattr(distillation, "compute_in_one_pass_if_free", count)
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1}
    options = sizes | {"teacher": path_of["teacher"]} | options
    trl_runs.train("Distillation", path_of["qwen3"], tmp_path, patch=True, **options)
    assert len(in_one_pass) == calls
