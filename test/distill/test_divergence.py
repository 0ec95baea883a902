"""The divergence of two heads against full logits in float64, what it costs, what it refuses; and TRL's and Liger's."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import oracles
from devices import skip_without_interpreter
from head_calls import Problem, Products, functional, problem, run_triton
from liger_rl import linear_divergence
from liger_rl.distill import Divergence, two_heads
from liger_rl.distill.divergence import DivergenceCall, compute_in_one_pass_if_free, make_measure
from liger_rl.head import LogitTransform, tiles
from liger_rl.head.head_options import HeadOptions
from liger_rl.kernels.limits import LIMITS
from peaks import tensor_peak

KINDS = {
    "forward_kl": {"kind": "forward_kl"},
    "reverse_kl": {"kind": "reverse_kl"},
    **{f"jsd {beta}": {"kind": "jsd", "beta": beta} for beta in (0, 0.3, 1.0)},
}
TRANSFORMS = [
    ({}, {}),
    ({"temperature": 0.7, "scale": 1.3}, {"softcap": 4.0}),
    ({"softcap": 3.0}, {"temperature": 1.9}),
]


class Pair(NamedTuple):
    own: Problem
    other: Problem  # the teacher
    mask: Tensor

    def arguments(self) -> dict[str, Tensor | None]:
        own, other = self.own, self.other
        heads = {"hidden": own.hidden, "weight": own.weight, "bias": own.bias}
        return heads | {"teacher_hidden": other.hidden, "teacher_weight": other.weight, "teacher_bias": other.bias}

    def leaves(self) -> "Pair":
        return self._replace(own=self.own.leaves())


def pair(shape=(3, 7), sizes=(16, 24), vocab=131, dtype=torch.float32, device="cpu", *, bias=True) -> Pair:
    own = problem(shape, sizes[0], vocab, dtype, device, bias=bias, seed=5)
    other = problem(shape, sizes[1], vocab, dtype, device, bias=bias, seed=6)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(5)).to(device) < 0.7
    return Pair(own, other, mask)


def solve(x: Pair, **options) -> tuple[Divergence, dict[str, Tensor]]:
    """Values, and gradients of a linear functional of the divergences."""
    x = x.leaves()
    found = linear_divergence(**x.arguments(), mask=x.mask, **options)
    functional(found.divergence).backward()
    return found, x.own.grads()


def solve_in_one_pass(x: Pair, factor: float, *, kind, beta=0.5, **options) -> tuple[Divergence, Tensor, Pair]:
    """Values, the loss factor * divergence.sum(), and its leaves."""
    x = x.leaves()
    call = DivergenceCall(
        **x.arguments(), mask=x.mask, teacher_transform=LogitTransform(), measure=make_measure(kind, beta),
        options=HeadOptions(**options),
    )  # fmt: skip
    found, hook = compute_in_one_pass_if_free(call, torch.tensor(factor, device=x.mask.device))
    assert hook is not None
    assert not found.divergence.requires_grad
    return found, factor * found.divergence.sum() + hook, x


def exact(
    x: Pair, *, kind, beta=0.5, transform=(), teacher_transform=(), double=True
) -> tuple[Divergence, dict[str, Tensor]]:
    """The same from full logits: in float64, or with logits in the inputs' dtype and a float32 softmax."""
    wide = torch.float64 if double else torch.float32
    own, other = (part.to(torch.float64) if double else part for part in (x.own, x.other))
    own = own.leaves()
    logits = torch.nn.functional.linear(own.hidden, own.weight, own.bias)
    teacher = torch.nn.functional.linear(other.hidden, other.weight, other.bias)
    log_p = oracles.transformed(logits.to(wide), **dict(transform)).log_softmax(-1)
    log_q = oracles.transformed(teacher.to(wide), **dict(teacher_transform)).log_softmax(-1)
    value, entropy = oracles.divergence(log_p, log_q, kind, beta), -(log_p.exp() * log_p).sum(-1)
    found = Divergence(*(torch.where(x.mask, part, 0.0) for part in (value, entropy)))
    functional(found.divergence).backward()
    return found, own.grads()


def parts(result: tuple[Divergence, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Values and gradients by name."""
    return {name: part.detach() for name, part in {**result[0]._asdict(), **result[1]}.items() if part is not None}


def assert_close(found, truth, tolerance=2e-5) -> None:
    mine = parts(found)
    for name, expected in parts(truth).items():
        error = (mine[name].double() - expected.double()).abs()
        assert (error <= tolerance * (1 + expected.abs())).all(), name


# --- values and gradients ---------------------------------------------------------------------------------------------


@pytest.fixture(params=["PyTorch", "Triton"])
def kernels(request, monkeypatch):
    """Triton's in its interpreter, on CPU."""
    if request.param == "Triton":
        skip_without_interpreter()
        run_triton(monkeypatch)


def small_tiles(monkeypatch) -> None:
    """Tiles of 4 tokens and 256 ids, and two sweeps of a mixture."""
    for kind in ("cpu", "cuda"):
        monkeypatch.setitem(LIMITS.workspace_bytes, kind, 1)
        monkeypatch.setitem(tiles.MOST_TOKENS, kind, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("kernels", "transforms", "in_tiles"),
    [
        ("PyTorch", TRANSFORMS[0], False),
        ("PyTorch", TRANSFORMS[2], False),
        ("PyTorch", TRANSFORMS[1], True),
        ("Triton", TRANSFORMS[1], True),
    ],
    ids=["whole", "other transforms", "tiles", "Triton"],
    indirect=["kernels"],
)
def test_oracle(kind, transforms, in_tiles, kernels, device, monkeypatch):
    """Of more ids than a block of a kernel has; what is masked may hold anything."""
    if in_tiles:
        small_tiles(monkeypatch)
    x = pair(vocab=1300, device=device)
    truth = exact(x, transform=transforms[0], teacher_transform=transforms[1], **KINDS[kind])
    x.own.hidden[~x.mask], x.other.hidden[~x.mask] = math.nan, math.inf
    own, other = (LogitTransform(**part) for part in transforms)
    found = solve(x, transform=own, teacher_transform=other, **KINDS[kind])
    assert_close(found, truth)
    assert all(part.dtype == torch.float32 and part.shape == (3, 7) for part in found[0])
    assert [part.requires_grad for part in found[0]] == [True, False]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("apart", "rtol", "atol"), [(1e-2, 0.0, 3e-7), (100.0, 2e-5, 3e-7)], ids=["near", "far"])
def test_nearly_equal_and_distant_heads(kind, apart, rtol, atol, kernels, device):
    """Divergences of about 1e-5 nats of logits around 10, which are a difference of large numbers in one formula."""
    logits = 10 + 2 * torch.randn(5, 1300)
    teacher = logits + apart * torch.randn(5, 1300)
    targets, mask = torch.zeros(5, dtype=torch.long, device=device), torch.ones(5, dtype=torch.bool, device=device)
    hidden, logits, teacher = (part.to(device) for part in (torch.eye(5), logits, teacher))
    x = Pair(Problem(hidden, logits.T, targets), Problem(hidden, teacher.T, targets), mask)
    found = linear_divergence(**x.arguments(), **KINDS[kind]).divergence
    truth = exact(x, **KINDS[kind])[0].divergence
    torch.testing.assert_close(found.double(), truth, rtol=rtol, atol=atol)
    assert (truth > 1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("how", "dtype"),
    [("", torch.float32), ("chunks", torch.float32), ("", torch.bfloat16), ("Triton", torch.bfloat16)],
)
def test_one_pass_agrees_with_two(kind, how, dtype, device, monkeypatch):
    """A factor from above, and a second backward."""
    if how == "Triton" and device.type == "cpu":
        skip_without_interpreter()
        run_triton(monkeypatch)
    if how == "chunks":  # of MIN_WHOLE_ROWS tokens
        monkeypatch.setattr(two_heads, "ONE_PASS_BYTES", {"cpu": 1, "cuda": 1})
    x = pair((40, 7) if how == "chunks" else (3, 7), dtype=dtype, device=device)
    one, loss, leaves = solve_in_one_pass(x, 0.3, **KINDS[kind])
    again = x.leaves()
    two = linear_divergence(**again.arguments(), mask=x.mask, **KINDS[kind])
    for mine, other in zip(one, two, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
    expected = torch.autograd.grad(two.divergence.sum() * 0.6, tuple(again.own.floats().values()))
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for keeps in (True, False):
        found = torch.autograd.grad(loss * 2, tuple(leaves.own.floats().values()), retain_graph=keeps)
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        assert not solve_in_one_pass(x, 0.3, **KINDS[kind])[1].requires_grad


@pytest.mark.parametrize("part", ["products", "weight"])
def test_one_pass_makes_no_gradient_in_float16(part):
    """A gradient scaler multiplies the loss only later."""
    given = pair(dtype=torch.float16, bias=False).leaves().arguments()
    options = HeadOptions()
    if part == "weight":
        given |= {name: given[name].detach().float() for name in ("hidden", "teacher_hidden")}
        options = HeadOptions(compute_dtype=torch.float32)
    call = DivergenceCall(
        **given, mask=None, teacher_transform=LogitTransform(), measure=make_measure("jsd", 0.5), options=options
    )
    found, hook = compute_in_one_pass_if_free(call, torch.tensor(1.0))
    assert hook is None
    found.divergence.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_no_further_from_float64_than_full_logits(kind):
    x = pair((64,), (64, 96), 1000, torch.bfloat16)
    x = x._replace(mask=torch.ones(64, dtype=torch.bool))
    found, eager, truth = solve(x, **KINDS[kind]), exact(x, double=False, **KINDS[kind]), exact(x, **KINDS[kind])
    for name, gold in parts(truth).items():
        budget = oracles.norm_budget(parts(eager)[name], gold, torch.bfloat16)
        assert oracles.norm_error(parts(found)[name], gold) <= budget, name
    assert oracles.norm_error(found[0].divergence, truth[0].divergence) < 1e-5 * truth[0].divergence.norm()


def test_equal_heads_have_no_divergence_and_no_gradient():
    x = problem(seed=5).leaves()
    for kind in KINDS.values():
        found = linear_divergence(x.hidden, x.weight, x.hidden.detach(), x.weight.detach(), **kind).divergence
        grads = torch.autograd.grad(found.sum(), (x.hidden, x.weight))
        assert found.abs().max() < 1e-6
        assert max(grad.abs().max() for grad in grads) < 1e-5


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd 0.3"])
def test_ids_that_both_heads_ban_are_as_if_they_were_not_there(kind, kernels, monkeypatch):
    """Whole tiles of them included, the first one among them."""
    small_tiles(monkeypatch)
    x = pair(vocab=700)
    banned = torch.zeros(700, dtype=torch.bool)
    banned[:260] = banned[300:303] = banned[500:] = True
    own, other = (part._replace(weight=part.weight[~banned], bias=part.bias[~banned]) for part in x[:2])
    truth = solve(x._replace(own=own, other=other), **KINDS[kind])
    x.own.bias[banned] = x.other.bias[banned] = -math.inf
    found = solve(x, **KINDS[kind])
    for name in ("weight", "bias"):
        assert (found[1][name][banned] == 0).all()
        found[1][name] = found[1][name][~banned]
    assert_close(found, truth)


@pytest.mark.parametrize(
    ("kind", "banned"),
    [
        ("forward_kl", "own"),
        ("reverse_kl", "own"),
        ("forward_kl", "other"),
        ("reverse_kl", "other"),
        ("jsd 0.3", "other"),
    ],
)
@pytest.mark.parametrize("passes", ["one", "two"])
def test_ids_that_one_head_bans(kind, banned, passes, kernels):
    """Where the divergence is finite, values and gradients are those of full logits with a bias of -1e4."""
    x = pair()._replace(mask=torch.ones(3, 7, dtype=torch.bool))
    head = getattr(x, banned)
    head.bias[3:9] = head.bias[50:] = -math.inf
    if passes == "one":
        found, loss, x = solve_in_one_pass(x, 1.0, **KINDS[kind])
    else:
        x = x.leaves()
        found = linear_divergence(**x.arguments(), **KINDS[kind])
        loss = found.divergence.sum()
    loss.backward()
    if {"own": "forward_kl", "other": "reverse_kl"}[banned] == kind:
        assert found.divergence.isinf().all()
        return
    own, other = (part.to(torch.float64) for part in x[:2])
    own, other = (part._replace(bias=part.bias.clamp(min=-1e4)).leaves() for part in (own, other))
    log_p, log_q = ((part.hidden @ part.weight.T + part.bias).log_softmax(-1) for part in (own, other))
    truth = oracles.divergence(log_p, log_q, **KINDS[kind])
    torch.testing.assert_close(found.divergence.double(), truth, rtol=2e-5, atol=2e-5)
    truth.sum().backward()
    for name, expected in own.grads().items():
        torch.testing.assert_close(x.own.grads()[name].double(), expected, rtol=2e-5, atol=2e-5)


def test_an_infinite_divergence_without_a_gradient(kernels):
    """The teacher alone bans ids, for some tokens. They have no part in a loss that leaves their divergences out."""
    x = pair()
    x.other.bias[3:9] = -math.inf
    own = x.own.leaves()
    teacher = {"teacher_bias": x.other.bias, "kind": "reverse_kl"}
    found = linear_divergence(own.hidden, own.weight, x.other.hidden, x.other.weight, bias=own.bias, **teacher)
    assert found.divergence.isinf().all()
    torch.where(found.divergence.isfinite(), found.divergence, 0.0).sum().backward()
    assert not any(grad.any() for grad in own.grads().values())  # any() is true for NaN


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_two_sweeps_where_whole_rows_do_not_fit(monkeypatch):
    x = pair((40,), vocab=300)
    once = solve(x, **KINDS["jsd 0.3"])
    monkeypatch.setattr(LIMITS, "workspace_bytes", {"cuda": 1, "cpu": 1})
    with Products() as products:
        twice = solve(x, **KINDS["jsd 0.3"])
    live = int(x.mask.sum())
    assert products.flops == live * 2 * 300 * (3 * (16 + 24) + 2 * 16)
    assert_close(once, twice, 1e-6)


@pytest.mark.parametrize("kind", ["forward_kl", "jsd 0.3"])
def test_memory_does_not_grow_with_tokens_times_vocabulary(kind, device):
    """The workspace, float32 hidden states, and their rows; full float32 logits of one head would take 66 MB."""
    n, vocab = 2048, 8000
    x = pair((n,), vocab=vocab, bias=False, device=device).leaves()
    with tensor_peak(device) as peak:
        linear_divergence(**x.arguments(), **KINDS[kind]).divergence.sum().backward()
    kind_of_device = device.type
    assert peak.bytes <= LIMITS.workspace_bytes[kind_of_device] + 4 * n * (16 + 24) * 4 + 4 * vocab * 16 + (1 << 20)
    if kind_of_device == "cpu":
        assert peak.bytes < 0.5 * n * vocab * 4


@pytest.mark.parametrize("kind", ["reverse_kl", "jsd 0.3"])
def test_several_teachers_cost_as_much_as_one(kind):
    """A call for each teacher with the mask of its rows; here it is the same one, so the sums are those of one call."""
    x = pair((5, 7))
    mine = torch.arange(5)[:, None] < 2
    with Products() as products:
        whole = parts(solve(x, **KINDS[kind]))
    with Products() as of_two:
        first, second = (parts(solve(x._replace(mask=x.mask & rows), **KINDS[kind])) for rows in (mine, ~mine))
    assert of_two.flops == products.flops > 0
    for name, expected in whole.items():
        torch.testing.assert_close(first[name] + second[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_that_student_and_teacher_share_is_not_copied(frozen, device):
    n, vocab, size = 8, 4000, 512
    x = problem((n,), size, vocab, torch.float32, device)
    weight, teacher_hidden = x.weight.clone().requires_grad_(not frozen), x.hidden + 1.0

    def gradients(teacher_weight: Tensor) -> list[Tensor]:
        hidden = x.hidden.clone().requires_grad_()
        found = linear_divergence(hidden, weight, teacher_hidden, teacher_weight, kind="reverse_kl").divergence
        return list(torch.autograd.grad(found.sum(), [hidden] if frozen else [hidden, weight]))

    with Products() as products:
        shared = gradients(weight.detach())
    if device.type == "cpu":
        read = [b for _, b in products.factors if b.shape[0] == size and b.stride(0) == 1]
        assert sum(b.shape[1] for b in read) == 4 * vocab  # two heads, forward and backward
        assert {b.untyped_storage().data_ptr() for b in read} == {weight.untyped_storage().data_ptr()}
    for found, expected in zip(shared, gradients(weight.detach().clone()), strict=True):
        assert torch.equal(found, expected)
    with tensor_peak(device) as peak:
        gradients(weight.detach())
    assert peak.bytes < (not frozen) * weight.nbytes + 0.4 * weight.nbytes


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["teacher_hidden", "teacher_weight", "teacher_bias"])
def test_a_teacher_that_requires_grad_is_refused(name):
    given = pair().arguments()
    given[name] = given[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name} must require no gradient, because it gets none"):
        linear_divergence(**given)
    with torch.no_grad():
        assert linear_divergence(**given).divergence.shape == (3, 7)


# --- what others compute ----------------------------------------------------------------------------------------------


def test_trl_and_liger_compute_the_same():
    """Liger's loss without its cross-entropy: the mean of the same numbers over the tokens that are not ignored."""
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer", reason="TRL is not installed")
    liger = pytest.importorskip("liger_kernel.chunked_loss", reason="Liger is not installed")
    x = pair((21,), bias=False)
    found = linear_divergence(**x.arguments(), kind="jsd", beta=0.3, mask=x.mask).divergence
    logits = [(part.hidden @ part.weight.T)[None] for part in x[:2]]
    labels = torch.where(x.mask, x.own.targets, -100)
    theirs = gkd.GKDTrainer.generalized_jsd_loss(*logits, labels=labels[None], beta=0.3, reduction="sum")
    torch.testing.assert_close(found.sum(), theirs, rtol=1e-5, atol=1e-5)
    loss = liger.LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.3, compiled=False)
    theirs = loss(x.own.hidden, x.own.weight, x.other.hidden, x.other.weight, labels)
    torch.testing.assert_close(found.sum() / x.mask.sum(), theirs, rtol=1e-5, atol=1e-5)
