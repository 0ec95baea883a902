"""The backward with a tolerance: no token loses more of its own gradient than was promised, and what is kept is right.

It runs whole where there is no GPU, too, in Triton's interpreter; there, without it, a tolerance computes exactly.
"""

import math
import os
import subprocess
import sys

import pytest
import torch

import oracles
from devices import NEEDS_GPU
from liger_rl import LogitTransform, linear_logprobs, plan_linear_logprobs
from liger_rl.call.checks import auto_tolerance
from liger_rl.engines.sparse import certified as sparse
from liger_rl.engines.sparse import lists
from liger_rl.kernels.statistics import BLOCK_VOCAB
from tolerances import DEVICE, LOW, TOKENS, VOCAB, batch, distance, gradients, interpret, recorded_plans

PLAIN, CAPPED = LogitTransform(), LogitTransform(softcap=4.0, scale=1.5)


@pytest.fixture
def interpreted(monkeypatch):
    interpret(monkeypatch)


@pytest.fixture
def plans(interpreted, monkeypatch):
    return recorded_plans(monkeypatch)


SPARSE = pytest.mark.usefixtures("interpreted")


@SPARSE
@pytest.mark.parametrize(("transform", "entropy"), [(PLAIN, False), (PLAIN, True), (CAPPED, True)])
@pytest.mark.parametrize("kind", ["sure", pytest.param("unsure", marks=NEEDS_GPU)])
def test_gradients_are_close(kind, transform, entropy):
    """The tolerance is of dL/dlogits; the products with weight and hidden enlarge an error by no more than here."""
    leaves, targets, grad = batch(kind)
    exact = gradients(leaves, targets, grad, transform=transform, entropy=entropy)
    for tolerance in (1e-3, 1e-2, 1e-1) if DEVICE.type == "cuda" else (1e-2,):
        found = gradients(leaves, targets, grad, transform=transform, entropy=entropy, grad_tolerance=tolerance)
        again = gradients(leaves, targets, grad, transform=transform, entropy=entropy, grad_tolerance=tolerance)
        for mine, same, other in zip(found, again, exact, strict=True):
            assert mine.dtype == other.dtype == LOW
            assert torch.equal(mine, same)
            assert distance(mine, other) <= 4 * tolerance + 1.2 * torch.finfo(LOW).eps


@SPARSE
@pytest.mark.parametrize("entropy", [False, pytest.param(True, marks=NEEDS_GPU)])
def test_a_direction_that_all_ids_share(entropy):
    """Rows of a trained head have much in common; what is left out must not add up along it."""
    leaves, targets, grad = batch("sure")
    with torch.no_grad():
        leaves[1] += 0.5 * torch.randn(1, leaves[1].shape[1], device=DEVICE)
    exact = gradients(leaves, targets, grad, entropy=entropy)
    for tolerance in (1e-2, 1e-1) if DEVICE.type == "cuda" else (1e-1,):
        found = gradients(leaves, targets, grad, entropy=entropy, grad_tolerance=tolerance)
        for mine, other in zip(found, exact, strict=True):
            assert distance(mine, other) <= 2 * tolerance + 1.2 * torch.finfo(LOW).eps


def test_parts_are_left_out(plans):
    """Or all of the above would hold for a backward that computes everything; without a tolerance nothing is."""
    leaves, targets, grad = batch("sure")
    found = [gradients(leaves, targets, grad, grad_tolerance=tolerance) for tolerance in (0.0, 1e-2, 3e-1)]
    shares = [plan.share for plan in plans]
    assert len(set(shares)) == len(shares) == 2
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.5
    assert all(map(torch.equal, found[0], gradients(leaves, targets, grad)))


@SPARSE
def test_the_default_is_a_tolerance_of_3e_4(plans):
    leaves, targets, grad = batch("sure")
    hidden, weight, bias = leaves
    by_default = torch.autograd.grad(linear_logprobs(hidden, weight, targets, bias=bias).logps, leaves, grad)
    found = by_default, gradients(leaves, targets, grad, grad_tolerance=3e-4)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert len(plans) == 2


@pytest.mark.parametrize("given", [{"lse": True}, {"fixed_shape": True}, {"batch_invariant": True}])
def test_the_default_gives_way(given, plans):
    leaves, targets, grad = batch("sure")
    found = linear_logprobs(*leaves[:2], targets, bias=leaves[2], **given)
    (found.logps * grad).sum().backward()
    assert not plans


def test_the_environment_names_another_default():
    code = "from liger_rl.call.options import HeadOptions, resolved; import torch\n"
    code += "print(resolved(HeadOptions(), torch.bfloat16).grad_tolerance)"
    environment = {**os.environ, "LIGER_RL_GRAD_TOLERANCE": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "0.0", done.stderr
    assert (auto_tolerance(None), auto_tolerance("1e-3")) == (3e-4, 1e-3)
    for wrong in ("exact", "-1", "1", "nan"):
        with pytest.raises(ValueError, match=rf"LIGER_RL_GRAD_TOLERANCE must be .* got '{wrong}'"):
            auto_tolerance(wrong)


def test_hidden_states_that_another_backward_needs():
    """The op writes to none of its inputs: tanh's backward reads what it gave."""
    leaves, targets, grad = batch("sure")
    x = leaves[0].detach().requires_grad_()
    logps = linear_logprobs(x.tanh(), leaves[1], targets, grad_tolerance=1e-2).logps
    assert torch.autograd.grad((logps * grad).sum(), x)[0].abs().max() > 0


def test_flat_distributions_take_the_dense_products(plans, monkeypatch):
    """Where most parts are kept the exact backward is the faster one, and it is what runs."""
    monkeypatch.setattr(lists, "dense_share", lambda hidden_size: 0.9)
    leaves, targets, grad = batch("unsure", tokens=TOKENS if DEVICE.type == "cuda" else 40)
    grad[::3] = 0.0
    found = gradients(leaves, targets, grad, grad_tolerance=1e-5)
    assert plans[0].share > 0.9
    assert all(map(torch.equal, found, gradients(leaves, targets, grad)))


@pytest.mark.parametrize("room", [1, 60])
def test_parts_that_there_is_no_room_for(room, plans, monkeypatch):
    """Lists are first written in one go, and run by run of tokens where there is no room for that: the same bits."""
    tokens = max(TOKENS, 300)
    leaves, targets, grad = batch("sure", tokens=tokens)
    grad[7] = 0.0
    mask = torch.arange(tokens, device=DEVICE) % 11 != 5
    expected = gradients(leaves, targets, grad, mask=mask, grad_tolerance=1e-2)
    monkeypatch.setattr(lists, "PARTS_BYTES", room * lists.BYTES_PER_ENTRY * BLOCK_VOCAB)
    found = gradients(leaves, targets, grad, mask=mask, grad_tolerance=1e-2)
    assert plans[0] == plans[1]
    assert plans[0].ends[-1] > room
    assert len(plans[0].spans(room)) > 2
    assert all(map(torch.equal, found, expected))


@SPARSE
def test_no_tile_is_kept_without_a_backward(monkeypatch):
    leaves, targets, _ = batch("sure")
    monkeypatch.setattr(sparse, "forward", None)  # would be called in vain
    with torch.no_grad():
        linear_logprobs(*leaves[:2], targets, grad_tolerance=0.1)
    linear_logprobs(*(leaf.detach() for leaf in leaves[:2]), targets, grad_tolerance=0.1)


@pytest.mark.parametrize("value", [torch.nan, 1e9])
def test_what_tokens_without_a_gradient_hold_does_no_harm(value, plans):
    """Not even numbers so large that their bounds overflow."""
    leaves, targets, grad = batch("sure")
    idle = TOKENS // 7
    grad[:idle] = 0.0
    with torch.no_grad():
        leaves[0][:idle] = 0.0
    expected, exact = (gradients(leaves, targets, grad, grad_tolerance=tolerance) for tolerance in (0.1, 0.0))
    with torch.no_grad():
        leaves[0][:idle] = value * leaves[1][targets[:idle]]
    found = gradients(leaves, targets, grad, grad_tolerance=0.1)
    assert len(plans) == 2
    assert all(plan.share < 0.8 for plan in plans)
    if not math.isfinite(value):
        assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))
    for mine, other in zip(found, exact, strict=True):
        assert distance(mine, other) <= 0.2


@pytest.mark.parametrize("banned", ["a target", "all of its tile"])
def test_a_banned_target_does_not_keep_every_part(banned, plans):
    """Its log-probability of -inf has a gradient of zero in a ratio; its entropy has one."""
    leaves, targets, grad = batch("sure")
    first = int(targets[7]) // BLOCK_VOCAB * BLOCK_VOCAB
    ids = targets[7] if banned == "a target" else slice(first, first + BLOCK_VOCAB)
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
        assert distance(mine, other) <= 0.2


def test_two_backwards_of_one_forward(plans):
    """Lists are each one's own; without a gradient of the hidden states they are made, too."""
    leaves, targets, grad = batch("sure")
    exact = gradients(leaves, targets, grad)
    found = linear_logprobs(*leaves[:2], targets, bias=leaves[2], grad_tolerance=1e-2)
    for _ in range(2):
        again = torch.autograd.grad(found.logps, leaves, grad, retain_graph=True)
        for mine, other in zip(again, exact, strict=True):
            assert distance(mine, other) <= 0.04 + 1.2 * torch.finfo(LOW).eps
    leaves[0].requires_grad_(False)
    gradients(leaves, targets, grad, grad_tolerance=1e-2)
    assert len(plans) == 3


@pytest.mark.parametrize(("transform", "entropy"), [(PLAIN, False), (PLAIN, True), (CAPPED, True)])
def test_the_certificate(transform, entropy, plans, monkeypatch):
    """With one-hot hidden states the weight's gradient is dL/dlogits: each token's error is within the tolerance.

    The float32 weight, whose products are in 16 bits, gets a gradient that is not rounded.
    """
    tokens, vocab = (600 if DEVICE.type == "cuda" else 64), 1100
    monkeypatch.setattr(lists, "most_ids", lambda vocab: vocab)
    monkeypatch.setattr(lists, "ROOM_FOR_IDS", 1.0)
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
    own, of_float32 = exact.grad.norm(dim=0), 4 * torch.finfo(torch.float32).eps * grads.double().abs().sum(0)
    for tolerance in (3e-5, 3e-4, 1e-2, 1e-1, 0.5) if DEVICE.type == "cuda" else (3e-5, 0.3):
        found = linear_logprobs(
            hidden, weight, targets.to(DEVICE), transform=transform, entropy=entropy, grad_tolerance=tolerance,
            compute_dtype=LOW,
        )  # fmt: skip
        (mine,) = torch.autograd.grad(loss(found.logps, found.entropy), weight)
        error = (mine.double() - exact.grad).norm(dim=0)
        assert (error <= tolerance * own + of_float32).all()
    assert plans[-1].share < plans[0].share


def test_compiled(plans):
    """As an operator of torch.compile's the call hands its bounds to the backward, of the tokens that count."""
    leaves, targets, grad = batch("sure")
    mask = torch.arange(TOKENS, device=DEVICE) % 5 != 0
    exact = gradients(leaves, targets, grad, mask=mask, entropy=True)

    def call(hidden, weight, bias):
        return linear_logprobs(hidden, weight, targets, mask=mask, bias=bias, entropy=True, grad_tolerance=1e-2)

    found = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
    loss = (found.logps * grad).sum() + 0.1 * (found.entropy * grad.roll(1)).sum()
    for mine, other in zip(torch.autograd.grad(loss, leaves), exact, strict=True):
        assert distance(mine, other) <= 0.04 + 1.2 * torch.finfo(LOW).eps
    assert len(plans) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_without_an_epilogue_the_gradient_is_exact(dtype):
    """To the last bit: on CPU a tolerance changes nothing, and the plan says why."""
    leaves, targets, grad = batch("sure", dtype=dtype)
    leaves, targets, grad = [leaf.detach().cpu().requires_grad_() for leaf in leaves], targets.cpu(), grad.cpu()
    found = gradients(leaves, targets, grad, entropy=True, grad_tolerance=0.5)
    expected = gradients(leaves, targets, grad, entropy=True)
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))
    plan = plan_linear_logprobs(TOKENS, VOCAB, 64, dtype=dtype, device="cpu", grad_tolerance=0.5)
    assert plan.path == "two passes"
    assert "sparse: needs a GPU" in plan.reason
