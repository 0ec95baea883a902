"""The divergence of two heads against full logits in float64, what it costs, what it refuses; and TRL's and Liger's."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import oracles
from devices import skip_without_interpreter
from head_calls import Products, functional, run_triton
from liger_rl import Divergence, LogitTransform, LowRank, linear_divergence
from liger_rl.engines.pair import two_heads as engine
from peaks import tensor_peak

KINDS = {
    "forward_kl": {"kind": "forward_kl"},
    "reverse_kl": {"kind": "reverse_kl"},
    **{f"jsd {beta}": {"kind": "jsd", "beta": beta} for beta in (0, 0.3, 0.5, 1.0)},
}
TRANSFORMS = [
    ({}, {}),
    ({"temperature": 0.7, "scale": 1.3}, {"softcap": 4.0}),
    ({"softcap": 3.0}, {"temperature": 1.9}),
]


class Problem(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    a: Tensor | None
    b: Tensor | None
    teacher_hidden: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor | None
    targets: Tensor
    mask: Tensor

    def student(self) -> dict[str, Tensor]:
        parts = {name: getattr(self, name) for name in ("hidden", "weight", "bias", "a", "b")}
        return {name: part for name, part in parts.items() if part is not None}

    def leaves(self, dtype=None) -> "Problem":
        teacher = ("teacher_hidden", "teacher_weight", "teacher_bias")
        others = {name: getattr(self, name) for name in teacher if getattr(self, name) is not None}
        others = {name: part.to(dtype or part.dtype) for name, part in others.items()}
        own = {name: t.detach().to(dtype or t.dtype).requires_grad_() for name, t in self.student().items()}
        return self._replace(**own, **others)


def problem(
    shape=(3, 7), sizes=(16, 24), vocab=(131, 131), dtype=torch.float32, device="cpu", *, bias=True, rank=0
) -> Problem:
    generator = torch.Generator().manual_seed(5)

    def random(*size: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=generator) * std).to(device, dtype)

    heads = [
        (random(*shape, size), random(v, size, std=2 / math.sqrt(size)), random(v) if bias else None)
        for size, v in zip(sizes, vocab, strict=True)
    ]
    low = (random(rank, sizes[0], std=0.3), random(vocab[0], rank, std=0.1)) if rank else (None, None)
    targets = torch.randint(min(vocab) - 11, shape, generator=generator).to(device)
    mask = torch.rand(shape, generator=generator).to(device) < 0.7
    return Problem(*heads[0], *low, *heads[1], targets, mask)


def solve(x: Problem, **options) -> tuple[Divergence, dict[str, Tensor]]:
    """Values, and gradients of a linear functional of all that is differentiable."""
    x = x.leaves()
    low_rank = [] if x.a is None else [LowRank(a=x.a, b=x.b, scaling=1.5)]
    given = {"entropy": True, "targets": x.targets, "mask": x.mask, **options}
    found = linear_divergence(
        x.hidden, x.weight, x.teacher_hidden, x.teacher_weight,
        bias=x.bias, teacher_bias=x.teacher_bias, low_rank=low_rank, **given,
    )  # fmt: skip
    functional(*found[:3]).backward()
    return found, {name: t.grad for name, t in x.student().items()}


def exact(
    x: Problem, *, kind, beta=0.5, vocab=None, transform=(), teacher_transform=(), low=False, double=True
) -> tuple[Divergence, dict[str, Tensor]]:
    """The same from full logits: in float64, or with logits in the inputs' dtype and a float32 softmax."""
    x = x.leaves(torch.float64 if double else None)
    wide = torch.float64 if double else torch.float32
    logits = torch.nn.functional.linear(x.hidden, x.weight, x.bias)
    if x.a is not None:
        logits = logits + 1.5 * (x.hidden @ x.a.mT) @ x.b.mT
    other = torch.nn.functional.linear(x.teacher_hidden, x.teacher_weight, x.teacher_bias)
    log_p = oracles.transformed(logits[..., :vocab].to(wide), **dict(transform)).log_softmax(-1)
    log_q = oracles.transformed(other[..., :vocab].to(wide), **dict(teacher_transform)).log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward_kl" or (kind, beta) == ("jsd", 0):
        value = (q * (log_q - log_p)).sum(-1)
    elif kind == "reverse_kl" or (kind, beta) == ("jsd", 1):
        value = (p * (log_p - log_q)).sum(-1)
    else:
        log_m = torch.log((1 - beta) * p + beta * q)
        value = beta * (q * (log_q - log_m)).sum(-1) + (1 - beta) * (p * (log_p - log_m)).sum(-1)
    at = x.targets[..., None]
    parts = (value, log_p.gather(-1, at).squeeze(-1), -(p * log_p).sum(-1), log_q.gather(-1, at).squeeze(-1))
    found = Divergence(*(torch.where(x.mask, part, 0.0) for part in parts))
    functional(*found[:3]).backward()
    return found, {name: t.grad for name, t in x.student().items()}


def parts(result: tuple[Divergence, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Values and gradients by name."""
    return {name: part for name, part in {**result[0]._asdict(), **result[1]}.items() if part is not None}


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("transforms", "options"),
    zip(TRANSFORMS, ({}, {"chunk_tokens": 4, "chunk_vocab": 1060}, {"fixed_shape": True}), strict=True),
    ids=["whole", "chunks", "fixed shape"],
)
def test_oracle(kind, transforms, options, kernels, device):
    """Of more ids than a block of a kernel has; what is padding, and what is masked, may hold anything."""
    x = problem(vocab=(1310, 1319), rank=3, device=device)
    truth = exact(x, vocab=1300, transform=transforms[0], teacher_transform=transforms[1], **KINDS[kind])
    for part in (x.weight[1300:], x.teacher_weight[1300:], x.bias[1300:]):
        part.fill_(77.0)
    x.hidden[~x.mask], x.teacher_hidden[~x.mask] = math.nan, math.inf
    own, other = (LogitTransform(**part) for part in transforms)
    found = solve(x, vocab=1300, transform=own, teacher_transform=other, **KINDS[kind], **options)
    assert_close(found, truth)
    assert all(part.dtype == torch.float32 and part.shape == (3, 7) for part in found[0][:4])
    assert not found[0].teacher_logps.requires_grad
    for name in ("weight", "bias", "b"):
        assert (found[1][name][1300:] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("apart", "rtol", "atol"), [(1e-2, 0.0, 3e-7), (100.0, 2e-5, 3e-7)], ids=["near", "far"])
def test_nearly_equal_and_distant_heads(kind, apart, rtol, atol, kernels, device):
    """Divergences of about 1e-5 nats of logits around 10, which are a difference of large numbers in one formula."""
    logits = 10 + 2 * torch.randn(5, 1300)
    teacher = logits + apart * torch.randn(5, 1300)
    targets, mask = torch.zeros(5, dtype=torch.long, device=device), torch.ones(5, dtype=torch.bool, device=device)
    hidden, logits, teacher = (part.to(device) for part in (torch.eye(5), logits, teacher))
    x = Problem(hidden, logits.T, None, None, None, hidden, teacher.T, None, targets, mask)
    found = linear_divergence(*x[:2], x.teacher_hidden, x.teacher_weight, **KINDS[kind]).divergence
    truth = exact(x, **KINDS[kind])[0].divergence
    torch.testing.assert_close(found.double(), truth, rtol=rtol, atol=atol)
    assert (truth > 1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "dtype", "triton"),
    [
        ({}, torch.float32, False),
        ({"vocab": 121}, torch.bfloat16, False),
        ({"chunk_tokens": 4}, torch.bfloat16, True),
    ],
)
def test_one_pass_agrees_with_two(kind, options, dtype, triton, device, monkeypatch):
    """A factor from above, and a second backward; a weight of 0 masks its token."""
    if triton and device.type == "cpu":
        skip_without_interpreter()
        run_triton(monkeypatch)
    x = problem(vocab=(131, 131), dtype=dtype, device=device).leaves()
    weights = torch.randn(3, 7, device=device) * (torch.arange(21, device=device).view(3, 7) % 4 > 0)
    given = {"bias": x.bias, "teacher_bias": x.teacher_bias, "targets": x.targets, "entropy": True, **KINDS[kind]}
    tensors = (x.hidden, x.weight, x.teacher_hidden, x.teacher_weight)
    mask = x.mask & (weights != 0)
    one = linear_divergence(*tensors, **given, mask=x.mask, token_weights=weights, **options)
    two = linear_divergence(*tensors, **given, mask=mask, **options)
    assert [part.requires_grad for part in one] == [False, False, False, False, True]
    for mine, other in zip(one[:4], two[:4], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
    leaves = (x.hidden, x.weight, x.bias)
    expected = torch.autograd.grad((two.divergence * weights).sum() * 2, leaves)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for again in (True, False):
        found = torch.autograd.grad(one.loss * 2, leaves, retain_graph=again)
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        assert not linear_divergence(*tensors, token_weights=weights).loss.requires_grad


@pytest.mark.parametrize("part", ["products", "weight"])
def test_one_pass_makes_no_gradient_in_float16(part):
    """A gradient scaler multiplies the loss only later. Values alone are made."""
    x = problem(vocab=(131, 131), dtype=torch.float16).leaves()
    tensors = [x.hidden, x.weight, x.teacher_hidden, x.teacher_weight]
    weights, options = torch.ones_like(x.hidden[..., 0]), {}
    if part == "weight":
        tensors[0], tensors[2] = (tensor.detach().float() for tensor in (x.hidden, x.teacher_hidden))
        options = {"compute_dtype": torch.float32}
    with pytest.raises(ValueError, match="token_weights must be None; the gradients"):
        linear_divergence(*tensors, token_weights=weights, **options)
    linear_divergence(*tensors, **options).divergence.sum().backward()
    with torch.no_grad():
        assert linear_divergence(*tensors, token_weights=weights, **options).loss > 0


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_no_further_from_float64_than_full_logits(kind):
    x = problem((64,), (64, 96), (1000, 1000), torch.bfloat16)
    x = x._replace(mask=torch.ones(64, dtype=torch.bool))
    found, eager, truth = solve(x, **KINDS[kind]), exact(x, double=False, **KINDS[kind]), exact(x, **KINDS[kind])
    for name, gold in parts(truth).items():
        budget = oracles.norm_budget(parts(eager)[name], gold, torch.bfloat16)
        assert oracles.norm_error(parts(found)[name], gold) <= budget, name
    assert oracles.norm_error(found[0].divergence, truth[0].divergence) < 1e-5 * truth[0].divergence.norm()


def test_equal_heads_have_no_divergence_and_no_gradient():
    x = problem(sizes=(16, 16)).leaves()
    for kind in KINDS.values():
        found = linear_divergence(x.hidden, x.weight, x.hidden.detach(), x.weight.detach(), **kind).divergence
        grads = torch.autograd.grad(found.sum(), (x.hidden, x.weight))
        assert found.abs().max() < 1e-6
        assert max(grad.abs().max() for grad in grads) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_both_heads_ban_are_as_if_they_were_not_there(kind, kernels):
    """Whole tiles of them included, the first one among them."""
    x = problem()
    banned = torch.zeros(131, dtype=torch.bool)
    banned[:20] = banned[50:53] = banned[100:] = True
    fewer = {name: getattr(x, name)[~banned] for name in x._fields if "weight" in name or "bias" in name}
    places = (~banned).nonzero()[:, 0]
    chosen = torch.randint(len(places), (3, 7))
    truth = solve(x._replace(**fewer, targets=chosen), **KINDS[kind])
    x.bias[banned] = x.teacher_bias[banned] = -math.inf
    found = solve(x._replace(targets=places[chosen]), **KINDS[kind], chunk_vocab=20)
    for name in ("weight", "bias"):
        assert (found[1][name][banned] == 0).all()
        found[1][name] = found[1][name][~banned]
    assert_close(found, truth)


def test_dtypes_of_each_head():
    x = problem(dtype=torch.bfloat16)
    wide = x._replace(**{name: getattr(x, name).float() for name in x._fields if name.startswith("teacher")})
    truth, bounds = exact(x, kind="jsd"), {"rtol": 1e-5, "atol": 1e-5}
    for given, options in ((wide, {}), (x, {"compute_dtype": torch.float32})):
        torch.testing.assert_close(
            solve(given, kind="jsd", **options)[0].divergence.double(), truth[0].divergence, **bounds
        )


# --- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
def test_products_of_one_pass(frozen, device):
    x = problem((40,), (16, 24), (300, 300), bias=False, device=device).leaves()
    weights, weight = torch.arange(40, device=device) < 10, x.weight.detach() if frozen else x.weight
    with Products() as products:
        linear_divergence(
            x.hidden, weight, x.teacher_hidden, x.teacher_weight, kind="jsd", token_weights=weights.float()
        ).loss.backward()
    assert products.flops == 10 * 2 * 300 * ((2 if frozen else 3) * 16 + 24)


def test_two_sweeps_where_whole_rows_do_not_fit(monkeypatch):
    x = problem((40,), (16, 24), (300, 300))
    once = solve(x, **KINDS["jsd 0.3"])
    monkeypatch.setattr(engine, "MIN_WHOLE_ROWS", 10**9)
    with Products() as products:
        twice = solve(x, **KINDS["jsd 0.3"])
    live = int(x.mask.sum())
    assert products.flops == live * 2 * 300 * (3 * (16 + 24) + 2 * 16)
    assert_close(once, twice, 1e-6)


@pytest.mark.parametrize("kind", ["forward_kl", "jsd 0.3"])
def test_memory_does_not_grow_with_tokens_times_vocabulary(kind, device):
    """The workspace, float32 hidden states, and their rows; full float32 logits of one head would take 66 MB."""
    n, vocab = 2048, 8000
    x = problem((n,), (16, 24), (vocab, vocab), bias=False, device=device).leaves()
    with tensor_peak(device) as peak:
        linear_divergence(
            x.hidden, x.weight, x.teacher_hidden, x.teacher_weight, **KINDS[kind]
        ).divergence.sum().backward()
    kind_of_device = device.type
    assert peak.bytes <= engine.WORKSPACE_BYTES[kind_of_device] + 4 * n * (16 + 24) * 4 + 4 * vocab * 16 + (1 << 20)
    if kind_of_device == "cpu":
        assert peak.bytes < 0.5 * n * vocab * 4


# --- what is refused --------------------------------------------------------------------------------------------------

BAD = [
    ({"kind": "kl"}, ValueError, "kind must be one of"),
    ({"kind": "jsd", "beta": 1.1}, ValueError, r"beta must be in \[0, 1\]"),
    ({"kind": "jsd", "beta": "half"}, TypeError, "beta must be a number"),
    ({"beta": 0.3}, ValueError, 'beta is an option of kind="jsd" alone'),
    ({"vocab": 132}, ValueError, "vocab must be at most the 131"),
    ({"vocab": 0}, ValueError, "vocab must be at least 1"),
    ({"grad_tolerance": 0.1}, ValueError, "grad_tolerance must be 0.0 with two heads"),
    ({"batch_invariant": True}, ValueError, "batch_invariant must be False with two heads"),
    ({"vocab_parallel": object()}, TypeError, "vocab_parallel must be a VocabParallel"),
    ({"nonsense": 1}, TypeError, "unexpected argument 'nonsense'"),
    ({"teacher_transform": 1.0}, TypeError, "transform must be"),
    (
        {"transform": LogitTransform(temperature=torch.ones(3, 7))},
        ValueError,
        "temperature of transform must be a number",
    ),
    ({"teacher_hidden": torch.zeros(3, 6, 24)}, ValueError, "teacher_hidden must have the tokens"),
    ({"teacher_hidden": torch.zeros(3, 7, 25)}, ValueError, "teacher_weight must be"),
    ({"teacher_weight": torch.zeros(140, 24)}, ValueError, "teacher_weight must have the 131 .* vocab="),
    ({"teacher_weight": torch.zeros(131, 24, dtype=torch.float64)}, TypeError, "teacher_weight must be float32"),
    ({"teacher_weight": torch.zeros(131, 24).bfloat16()}, TypeError, "teacher_weight must be torch.float32"),
    ({"teacher_bias": torch.zeros(7)}, ValueError, "teacher_bias must be"),
    ({"weight": torch.zeros(131, 24)}, ValueError, "^weight must be"),
    ({"targets": torch.full((3, 7), 131)}, ValueError, "targets must be token ids"),
    ({"targets": torch.full((3, 7), 125), "vocab": 120}, ValueError, "targets must be token ids .* from vocab"),
    ({"mask": torch.zeros(7)}, ValueError, "mask must be"),
    ({"token_weights": torch.zeros(7)}, ValueError, "token_weights must be"),
    ({"token_weights": torch.zeros(3, 7, requires_grad=True)}, ValueError, "token_weights must require no gradient"),
]


@pytest.mark.parametrize(("changed", "error", "message"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_input(changed, error, message):
    x = problem()
    given = {name: getattr(x, name) for name in ("hidden", "weight", "teacher_hidden", "teacher_weight")}
    with pytest.raises(error, match=message):
        linear_divergence(**{**given, **changed})


@pytest.mark.parametrize("name", ["teacher_hidden", "teacher_weight", "teacher_bias"])
def test_a_teacher_that_requires_grad_is_refused(name):
    x = problem()
    x = x._replace(**{name: getattr(x, name).requires_grad_()})
    given = {key: getattr(x, key) for key in (*x._fields[:3], *x._fields[5:8])}
    with pytest.raises(ValueError, match=f"{name} must require no gradient, because only the student's side gets one"):
        linear_divergence(**given)
    with torch.no_grad():
        assert linear_divergence(**given).divergence.shape == (3, 7)


# --- what others compute ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_trl_and_liger_compute_the_same(beta):
    """Liger's loss without its cross-entropy: the mean of the same numbers over the tokens that are not ignored."""
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer", reason="TRL is not installed")
    liger = pytest.importorskip("liger_kernel.chunked_loss", reason="Liger is not installed")
    x = problem((21,))
    found = linear_divergence(
        x.hidden, x.weight, x.teacher_hidden, x.teacher_weight, kind="jsd", beta=beta, mask=x.mask
    ).divergence
    logits = [(h @ w.T)[None] for h, w in ((x.hidden, x.weight), (x.teacher_hidden, x.teacher_weight))]
    labels = torch.where(x.mask, x.targets, -100)
    theirs = gkd.GKDTrainer.generalized_jsd_loss(*logits, labels=labels[None], beta=beta, reduction="sum")
    torch.testing.assert_close(found.sum(), theirs, rtol=1e-5, atol=1e-5)
    loss = liger.LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, compiled=False)
    theirs = loss(x.hidden, x.weight, x.teacher_hidden, x.teacher_weight, labels)
    torch.testing.assert_close(found.sum() / x.mask.sum(), theirs, rtol=1e-5, atol=1e-5)
