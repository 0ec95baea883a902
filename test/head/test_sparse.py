"""The backward of one head with a tolerance: no token loses more of its own gradient than was promised.

It runs whole where there is no GPU, too, in Triton's interpreter; there, without it, a tolerance computes exactly.
More properties: test_tolerance_of_heads.py.
"""

import os
import subprocess
import sys

import pytest
import torch

import oracles
from devices import NEEDS_GPU, on_gpu
from liger_rl import LogitTransform, linear_logprobs
from liger_rl.head.checks import auto_tolerance
from liger_rl.head.sparse import certified as sparse
from liger_rl.head.sparse import lists
from liger_rl.kernels.limits import LIMITS
from liger_rl.kernels.statistics import PART_VOCAB
from tolerances import DEVICE, LOW, TOKENS, interpret, one_head, recorded_plans

PLAIN, CAPPED = LogitTransform(), LogitTransform(softcap=4.0, scale=1.5)


@pytest.fixture
def plans(monkeypatch):
    interpret(monkeypatch)
    return recorded_plans(monkeypatch)


@pytest.mark.parametrize("entropy", [False, pytest.param(True, marks=NEEDS_GPU)])
def test_a_direction_that_all_ids_share(entropy, plans):
    """Rows of a trained head have much in common; what is left out must not add up along it."""
    heads = one_head()
    heads.leaves[1].add_(0.5 * torch.randn(1, 64, device=DEVICE))
    exact = heads.gradients(0.0, entropy=entropy)
    for tolerance in (1e-2, 1e-1) if DEVICE.type == "cuda" else (1e-1,):
        for mine, other in zip(heads.gradients(tolerance, entropy=entropy), exact, strict=True):
            assert oracles.relative_error(mine, other) <= 2 * tolerance + 1.2 * torch.finfo(LOW).eps


def test_the_default_is_a_tolerance_of_3e_4(plans):
    heads = one_head()
    leaves = heads.trained()
    by_default = torch.autograd.grad(heads.loss(leaves), leaves)
    assert all(map(torch.equal, by_default, heads.gradients(3e-4)))
    assert len(plans) == 2


def test_the_default_gives_way(plans):
    heads = one_head()
    heads.loss(heads.trained(), lse=True).backward()
    assert not plans


def test_the_environment_names_another_default():
    code = "from liger_rl.head.head_options import HeadOptions; import torch\n"
    code += "print(HeadOptions().tolerance_of(torch.bfloat16, exact=False))"
    environment = {**os.environ, "LIGER_RL_GRAD_TOLERANCE": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "0.0", done.stderr
    assert [auto_tolerance(setting) for setting in (None, "auto", "1e-3")] == [3e-4, 3e-4, 1e-3]
    for wrong in ("exact", "-1", "1", "nan"):
        with pytest.raises(ValueError, match=rf"LIGER_RL_GRAD_TOLERANCE must be .* got '{wrong}'"):
            auto_tolerance(wrong)


@pytest.mark.parametrize("has_gradient", [False, True])
def test_a_gradient_of_the_mean_logit_is_exact(has_gradient, plans):
    """It has a part at each id. A mean logit that is only read leaves the lists of ids as they are."""
    heads = one_head()

    def values(hidden, weight, bias, tolerance):
        given = {"bias": bias, "extras": ("mean_logits",), "grad_tolerance": tolerance}
        found = linear_logprobs(hidden, weight, heads.targets, **given)
        return found.logps, found.mean_logits

    def gradients(tolerance):
        leaves = heads.trained()
        logps, mean_logits = values(*leaves, tolerance)
        loss = (logps * heads.grad).sum()
        return torch.autograd.grad(loss + mean_logits.sum() if has_gradient else loss, leaves)

    found, exact = gradients(0.1), gradients(0.0)
    assert len(plans) == (not has_gradient)
    assert all(map(torch.equal, found, exact)) == has_gradient


def test_inputs_are_left_alone(plans):
    """Or tanh's backward, which reads its own result, would raise."""
    heads = one_head()
    x = heads.leaves[0].detach().requires_grad_()
    logps = linear_logprobs(x.tanh(), heads.leaves[1].requires_grad_(), heads.targets, grad_tolerance=1e-2).logps
    assert torch.autograd.grad((logps * heads.grad).sum(), x)[0].abs().max() > 0


def test_parts_that_there_is_no_room_for(plans, monkeypatch):
    """Lists are written in one go, or run by run of tokens if the memory has no room for all parts: the same bits."""
    tokens, room = max(TOKENS, 300), 60
    heads = one_head(tokens)
    heads.grad[7] = 0.0
    mask = torch.arange(tokens, device=DEVICE) % 11 != 5
    expected = heads.gradients(1e-2, mask=mask)
    monkeypatch.setattr(LIMITS, "parts_bytes", room * lists.BYTES_PER_ENTRY * PART_VOCAB)
    found = heads.gradients(1e-2, mask=mask)
    assert plans[0] == plans[1]
    assert plans[0].block_ends[-1] > room
    assert len(plans[0].split(room)) > 2
    assert all(map(torch.equal, found, expected))


def test_no_tile_is_kept_without_a_backward(plans, monkeypatch):
    heads = one_head()
    monkeypatch.setattr(sparse.Sparse, "forward", None)  # would be called in vain
    with torch.no_grad():
        heads.loss(heads.trained(), grad_tolerance=0.1)
    heads.loss(heads.leaves, grad_tolerance=0.1)


def test_numbers_so_large_that_bounds_overflow(plans):
    """At tokens without a gradient. Of NaN: test_tolerance_of_heads.py."""
    heads, idle = one_head(), TOKENS // 7
    heads.grad[:idle] = 0.0
    heads.leaves[0][:idle] = 0.0
    exact = heads.gradients(0.0)
    heads.leaves[0][:idle] = 1e9 * heads.leaves[1][heads.targets[:idle]]
    for mine, other in zip(heads.gradients(0.1), exact, strict=True):
        assert oracles.relative_error(mine, other) <= 0.2
    assert plans[0].share < 0.8


@pytest.mark.parametrize("banned", ["a target", "all of its tile"])
def test_a_banned_target_does_not_keep_every_part(banned, plans):
    """Its log-probability of -inf has a gradient of zero in a ratio; its entropy has one."""
    heads = one_head()
    leaves, targets, grad = heads.trained(), heads.targets, heads.grad
    first = int(targets[7]) // PART_VOCAB * PART_VOCAB
    ids = targets[7] if banned == "a target" else slice(first, first + PART_VOCAB)
    with torch.no_grad():
        leaves[2][ids] = -torch.inf
    of_entropy = 0.1 * grad.roll(1)
    assert of_entropy[7] != 0

    def gradients_at(tolerance):
        found = linear_logprobs(*leaves[:2], targets, bias=leaves[2], entropy=True, grad_tolerance=tolerance)
        assert found.logps[7] == -torch.inf
        grad[found.logps.isinf()] = 0.0
        return torch.autograd.grad([found.logps, found.entropy], leaves, [grad, of_entropy])

    found, exact = gradients_at(0.1), gradients_at(0.0)
    assert plans[0].share < 0.8
    for mine, other in zip(found, exact, strict=True):
        assert mine.isfinite().all()
        assert oracles.relative_error(mine, other) <= 0.2


@pytest.mark.parametrize(("transform", "entropy"), [(PLAIN, False), (CAPPED, True), *on_gpu((PLAIN, True))])
def test_the_certificate(transform, entropy, plans, monkeypatch):
    """With one-hot hidden states the weight's gradient is dL/dlogits: each token's error is within the tolerance.

    The float32 weight, whose products are in 16 bits, gets a gradient that is not rounded.
    """
    tokens, vocab = (600 if DEVICE.type == "cuda" else 64), 1100
    monkeypatch.setattr(LIMITS, "mean_ids", vocab)
    monkeypatch.setattr(LIMITS, "listed_share", 1.0)
    logits = 2.0 * torch.randn(tokens, vocab)
    targets = torch.randint(vocab, (tokens,))
    # From tokens that are surprised to those whose 1 - p is 1e-7.
    logits[torch.arange(tokens), targets] += 22.0 * torch.rand(tokens)
    hidden, weight = torch.eye(tokens).to(DEVICE, LOW), logits.T.to(DEVICE, LOW).float().requires_grad_()
    grads = torch.randn(2, tokens).to(DEVICE) * torch.logspace(0, -2, tokens).to(DEVICE)

    def loss(logps, entropies):
        total = (logps * grads[0]).sum()
        return total + (entropies * grads[1]).sum() if entropy else total

    options = {name: getattr(transform, name) for name in ("temperature", "softcap", "scale")}
    exact = weight.detach().double().requires_grad_()
    loss(*oracles.logits_logprobs(exact.T, targets.to(DEVICE), **options)).backward()
    own, eps = exact.grad.norm(dim=0), torch.finfo(torch.float32).eps
    # On an H200 log-probabilities are within 7 eps, and so is 1 - p, of which the target's entry is made.
    of_float32 = 10 * eps * grads.double().abs().sum(0)
    # z and lse are rounded to float32 before their difference becomes a probability.
    of_logits = eps * oracles.transformed(exact.detach(), **options).abs().amax(0)
    for tolerance in (3e-5, 3e-4, 1e-2, 1e-1, 0.5) if DEVICE.type == "cuda" else (3e-5, 0.3):
        found = linear_logprobs(
            hidden, weight, targets.to(DEVICE), transform=transform, entropy=entropy, grad_tolerance=tolerance,
            compute_dtype=LOW,
        )  # fmt: skip
        (mine,) = torch.autograd.grad(loss(found.logps, found.entropy), weight)
        error = (mine.double() - exact.grad).norm(dim=0)
        assert (error <= (tolerance + of_logits) * own + of_float32).all(), (error / own / tolerance).max()
    assert plans[-1].share < plans[0].share
