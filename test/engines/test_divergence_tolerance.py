"""Two heads with a tolerance: no token loses more of its own gradient than was promised, and what is kept is right.

It runs whole where there is no GPU, too, in Triton's interpreter; there, without it, a tolerance computes exactly.
"""

import math

import pytest
import torch
from torch import Tensor

from devices import NEEDS_GPU
from host_reads import host_reads
from liger_rl import LogitTransform, LowRank
from liger_rl.engines.sparse import lists
from liger_rl.kernels.devices import PORTABLE
from tolerances import DEVICE, LOW, PAIR_VOCAB, TILE, Heads, distance, interpret_pairs, recorded_plans, two_heads

PADDING = 40
KINDS = {
    "forward": {"kind": "forward_kl"},
    "reverse": {"kind": "reverse_kl"},
    **{f"jsd {beta}": {"kind": "jsd", "beta": beta} for beta in (0.5, 0.02, 0.97)},
}


@pytest.fixture
def plans(monkeypatch):
    interpret_pairs(monkeypatch)
    return recorded_plans(monkeypatch)


# --- the certificate --------------------------------------------------------------------------------------------------


def _sure(z: Tensor) -> Tensor:
    z[torch.arange(len(z)), torch.randint(z.shape[1], (len(z),))] += 16 * torch.rand(len(z))
    return z


def near(z: Tensor) -> tuple[Tensor, Tensor]:
    return _sure(z), z + 0.03 * torch.randn_like(z)


def far(z: Tensor) -> tuple[Tensor, Tensor]:
    return _sure(z), _sure(torch.randn_like(z))


def same_but_for_one_tile(z: Tensor) -> tuple[Tensor, Tensor]:
    """All others differ by the normalisers alone, and each of their parts is of one sign."""
    t = _sure(z).clone()
    t[:, TILE : 2 * TILE] += torch.randn(len(z), 1)
    return z, t


def alternating(z: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of parts are 0, or nearly, and each part is as large as ever."""
    return z, z.unflatten(1, (-1, 2)).flip(2).flatten(1)


def one_entry_of_each_tile(z: Tensor) -> tuple[Tensor, Tensor]:
    """Shares that are of one entry, where what is left out is of many."""
    z[: len(z) // 2, ::TILE] += 8
    return z, z + torch.randn_like(z)


def opposite(z: Tensor) -> tuple[Tensor, Tensor]:
    """What is likely for one is all but impossible for the other, so log-ratios are large where nothing is likely."""
    return 1.5 * z, -1.5 * z


def saturated(z: Tensor) -> tuple[Tensor, Tensor]:
    """All of the gradient is far smaller than its factor."""
    z = 0.3 * z - 16.0
    z[:, 3] = 0.0
    return z, z + torch.randn_like(z)


PAIRS = [near, far, same_but_for_one_tile, alternating, one_entry_of_each_tile, opposite, saturated]
OF_EACH = 8 if DEVICE.type == "cuda" else 3


def in_float64(z: Tensor, t: Tensor, grad: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """dL/dlogits, from the formulas."""
    log_p, log_q = (x.log_softmax(-1) for x in (z, t))
    p = log_p.exp()
    if kind == "forward_kl":
        found = p - log_q.exp()
    else:
        over = log_p - log_q
        if kind == "jsd":
            over = log_p - torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
        found = p * (over - (p * over).sum(-1, keepdim=True)) * (1 - beta if kind == "jsd" else 1)
    return found * grad.double()[:, None]


@pytest.mark.parametrize(
    ("kind", "with_logps", "family"),
    [(kind, more, None) for kind in ("forward", "reverse", "jsd 0.5") for more in (False, True)]
    + [("reverse", True, PORTABLE[0]), ("jsd 0.5", False, PORTABLE[2])]
    + [pytest.param(k, more, None, marks=NEEDS_GPU) for k in ("jsd 0.02", "jsd 0.97") for more in (False, True)],
)
def test_the_certificate(kind, with_logps, family, plans, monkeypatch):
    """Of one-hot hidden states the weight's gradient is dL/dlogits: each token's error is within the tolerance.

    Some logits are so large that float32 knows few digits of them. With log-probabilities, as in the gradient of a
    policy with a penalty, there are banned ids, padding and a temperature, too.
    """
    if family is not None:
        from liger_rl.engines.pair import bounds_triton

        monkeypatch.setattr(bounds_triton, "family_of", lambda device: family)
    made = (make(2 * torch.randn(OF_EACH, PAIR_VOCAB)) for make in PAIRS)
    both = [torch.cat(parts) for parts in zip(*made, strict=True)]
    n, shift = len(both[0]), torch.tensor([[2000.0, -1000.0]])
    columns = -(-(n + 1) // 8) * 8
    hidden = [torch.eye(n, columns) for _ in both]
    weights = [torch.nn.functional.pad(part.T, (0, columns - n)).to(LOW) for part in both]
    for own, weight, far_off in zip(hidden, weights, shift[0], strict=True):
        own[1::OF_EACH, n], weight[:, n] = far_off, 1.0
    bias, options, vocab = torch.zeros(PAIR_VOCAB), dict(KINDS[kind]), PAIR_VOCAB
    grad = torch.randn(n) * torch.logspace(0, -2, n)[torch.randperm(n)]
    grad[5], of_logps = 0.0, None
    z, t = (own.double() @ weight.double().T for own, weight in zip(hidden, weights, strict=True))
    allowed = torch.ones(PAIR_VOCAB, dtype=torch.bool)
    if with_logps:
        vocab = PAIR_VOCAB - PADDING
        for weight in weights:
            weight[vocab:] = 40.0
        allowed[2 * TILE - 20 : 3 * TILE], allowed[vocab:], bias[~allowed] = False, False, -torch.inf
        transform = LogitTransform(temperature=0.7, scale=1.4)
        targets = torch.where(torch.rand(n) < 0.5, z[:, : 2 * TILE - 20].argmax(-1), torch.randint(TILE, (n,)))
        of_logps = torch.randn(n) * torch.logspace(0, -2, n)[torch.randperm(n)]
        of_logps[::5] = 0.0
        options |= {"targets": targets.to(DEVICE), "vocab": vocab}
        options |= {"transform": transform, "teacher_transform": transform}
        z, t = 2.0 * z, 2.0 * t
        options["teacher_bias"] = bias.to(DEVICE)
    exact = torch.zeros(n, PAIR_VOCAB, dtype=torch.float64)
    exact[:, allowed] = in_float64(z[:, allowed], t[:, allowed], grad, **KINDS[kind])
    if with_logps:
        own = torch.nn.functional.one_hot(targets, PAIR_VOCAB) - z.where(allowed, -torch.inf).softmax(-1)
        exact = 2.0 * (exact + of_logps[:, None] * own)
        of_logps = of_logps.to(DEVICE)
    parts = (hidden[0].to(LOW), weights[0], bias, hidden[1].to(LOW), weights[1], grad)
    *leaves, teacher_hidden, teacher_weight, grad = (part.to(DEVICE) for part in parts)
    heads = Heads(leaves, grad, options.pop("targets", None), (teacher_hidden, teacher_weight))

    def errors(tolerance: float) -> Tensor:
        found = heads.gradients(tolerance, of_logps=of_logps, **options)[1].T[:n]
        assert not found[:, vocab:].any()
        return (found.double().cpu() - exact).norm(dim=1)

    rounding = 2 * errors(0.0) + (2e-6 if DEVICE.type == "cpu" else 0.0)  # where float16 ends
    tolerances = (1e-3, 3e-2, 0.3) if DEVICE.type == "cuda" else (3e-2, 0.3)
    for tolerance in tolerances:
        assert (errors(tolerance) <= tolerance * exact.norm(dim=1) + rounding).all()
    assert len(plans) == len(tolerances)
    assert plans[-1].share < min(plans[0].share, 0.9)


def test_squares_that_vanish(plans, monkeypatch):
    """A part is kept though its squares are 0 in float32: the gradient from above may be as large as it is small."""
    monkeypatch.setattr(lists, "ROOM_FOR_IDS", 2.0)  # for the lists of all entries
    z, large = 0.3 * torch.randn(8, PAIR_VOCAB) - 63.0, 1e25
    t = alternating(z)[1].clone()
    z[:, 2:4] = t[:, 2:4] = torch.tensor([-63.0, 0.0])
    own, other = (part.T.contiguous().to(LOW) for part in (z, t))
    exact = in_float64(own.T.double(), other.T.double(), torch.full((8,), large), "jsd")
    parts = (torch.eye(8).to(LOW), own, torch.zeros(PAIR_VOCAB), torch.eye(8).to(LOW), other, torch.full((8,), large))
    *leaves, teacher_hidden, teacher_weight, grad = (part.to(DEVICE) for part in parts)
    heads = Heads(leaves, grad, None, (teacher_hidden, teacher_weight))
    found = heads.gradients(0.1, kind="jsd")[1].T.double().cpu()
    assert len(plans) == 1
    assert ((found - exact).norm(dim=1) <= 0.12 * exact.norm(dim=1)).all()


def test_what_is_left_out_adds_up(plans):
    """Rows of a trained head have much in common; dL/dhidden has no error along it."""
    heads = two_heads()._replace(targets=torch.arange(40, device=DEVICE) * 29)
    shift = 3.0 * torch.randn(1, 48, device=DEVICE)
    shifted = heads._replace(leaves=[heads.leaves[0], (heads.leaves[1] + shift).to(LOW), heads.leaves[2]])
    options = {"transform": LogitTransform(temperature=0.5)}
    (plain, found), (plain_exact, exact) = (
        [x.gradients(tolerance, **options)[0] for x in (heads, shifted)] for tolerance in (1e-1, 0.0)
    )
    assert plans[0].share < 0.6
    assert distance(found, exact) <= 1.2 * distance(plain, plain_exact) + 1.5 * torch.finfo(LOW).eps


def test_a_backward_waits_twice(plans):
    """For the number of kept parts, and for that of listed ids."""
    heads = two_heads(16)
    leaves = heads.trained()
    loss = heads.loss(leaves, kind="jsd", grad_tolerance=1e-1)
    with host_reads(DEVICE) as reads:
        torch.autograd.grad(loss, leaves)
    assert len([name for name in reads.names if name != "nonzero"]) == 2  # which is of sums in PyTorch
    assert len(plans) == 1


@pytest.mark.parametrize("case", ["softcap", "low rank", "entropy", "converted"])
def test_without_a_certificate_the_gradient_is_exact(case, plans):
    heads, options = two_heads(16), {}
    if case == "softcap":
        options = {"transform": LogitTransform(softcap=5.0)}
    if case == "low rank":
        a, b = (torch.ones(shape, device=DEVICE, dtype=LOW) for shape in ((1, 48), (PAIR_VOCAB, 1)))
        options = {"low_rank": [LowRank(a=a, b=b, scaling=0.1)]}
    if case == "entropy":
        options = {"entropy": True}
    if case == "converted":
        heads.leaves[1:] = [leaf.float() for leaf in heads.leaves[1:]]
        options = {"compute_dtype": LOW}
    assert all(map(torch.equal, heads.gradients(0.3, **options), heads.gradients(0.0, **options)))
    assert not plans
