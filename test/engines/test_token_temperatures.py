"""A temperature for each token, against the full logits in float64."""

import math

import pytest
import torch
from torch import Tensor

import oracles
from head_calls import run_triton
from liger_rl import (
    FusedLinearGRPOLoss,
    LogitTransform,
    LowRank,
    Support,
    linear_logprobs,
    logits_logprobs,
    plan_linear_logprobs,
)

TOKENS, HIDDEN, VOCAB = 23, 16, 150


@pytest.fixture(params=["of the device", "triton"], autouse=True)
def kernels(request, monkeypatch):
    if request.param == "triton":
        if torch.cuda.is_available():
            pytest.skip("Triton's interpreter is off where there is a GPU")
        run_triton(monkeypatch)


@pytest.fixture
def problem(device) -> dict[str, Tensor]:
    def random(*size: int) -> Tensor:
        return torch.randn(*size).to(device)

    mask = torch.rand(TOKENS) < 0.8
    return {
        "hidden": random(TOKENS, HIDDEN).requires_grad_(),
        "weight": (random(VOCAB, HIDDEN) / 2).requires_grad_(),
        "targets": torch.randint(VOCAB, (TOKENS,)).to(device),
        "mask": mask.to(device),
        # Whatever they are where no token counts.
        "temperature": torch.where(mask, 0.3 + torch.rand(TOKENS), 0.0).to(device),
        "slopes": random(2, TOKENS),
    }


def truth(x: dict[str, Tensor], *, softcap=None, scale=1.0, allowed=None) -> tuple[Tensor, ...]:
    leaves = [x[name].detach().double().requires_grad_() for name in ("hidden", "weight")]
    z = oracles.transformed(leaves[0] @ leaves[1].T, temperature=1.0, softcap=softcap, scale=scale)
    z = z / torch.where(x["mask"], x["temperature"], 1.0).double()[:, None]
    z = z if allowed is None else z.masked_fill(~allowed, -1e30)
    log_p = z.log_softmax(-1)
    logps = log_p.gather(1, x["targets"][:, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(1)
    logps, entropy = (torch.where(x["mask"], part, 0.0) for part in (logps, entropy))
    grads = torch.autograd.grad((logps * x["slopes"][0] + entropy * x["slopes"][1]).sum(), leaves)
    return logps.detach(), entropy.detach(), *grads


def found(x: dict[str, Tensor], out) -> tuple[Tensor, ...]:
    leaves = x["hidden"], x["weight"]
    loss = (out.logps * x["slopes"][0] + out.entropy * x["slopes"][1]).sum()
    return out.logps.detach(), out.entropy.detach(), *torch.autograd.grad(loss, leaves)


def close(mine: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for part, exact in zip(mine, expected, strict=True):
        torch.testing.assert_close(part.double(), exact, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("transform", [{}, {"softcap": 4.0, "scale": 0.7}], ids=["plain", "softcap"])
@pytest.mark.parametrize(
    "options",
    [{}, {"chunk_tokens": 5, "chunk_vocab": 64}, {"fixed_shape": True}, {"batch_invariant": True}],
    ids=["default", "tiles", "fixed shape", "invariant"],
)
def test_values_and_gradients(problem, transform, options):
    x, given = problem, LogitTransform(temperature=problem["temperature"], **transform)
    out = linear_logprobs(
        x["hidden"], x["weight"], x["targets"], mask=x["mask"], transform=given, entropy=True, **options
    )
    close(found(x, out), truth(x, **transform))


@pytest.mark.parametrize("transform", [{}, {"softcap": 4.0, "scale": 0.7}], ids=["plain", "softcap"])
def test_over_a_support(problem, transform):
    x, given = problem, LogitTransform(temperature=problem["temperature"], **transform)
    rows = [torch.randperm(VOCAB)[: 3 * (t % 4)].tolist() for t in range(TOKENS)]
    allowed = torch.zeros(TOKENS, VOCAB, dtype=torch.bool)
    for t, row in enumerate(rows):
        allowed[t, [*row, int(x["targets"][t])] if row else slice(None)] = True
    out = linear_logprobs(
        x["hidden"], x["weight"], x["targets"], mask=x["mask"], transform=given, entropy=True,
        support=Support.from_vllm(rows, device=x["hidden"].device),
    )  # fmt: skip
    close(found(x, out), truth(x, **transform, allowed=allowed.to(x["hidden"].device)))


@pytest.mark.parametrize("transform", [{}, {"softcap": 4.0, "scale": 0.7}], ids=["plain", "softcap"])
def test_of_given_logits(problem, transform):
    x, given = problem, LogitTransform(temperature=problem["temperature"], **transform)
    logits = x["hidden"] @ x["weight"].T
    out = logits_logprobs(logits, x["targets"], mask=x["mask"], transform=given, entropy=True)
    close(found(x, out), truth(x, **transform))


def test_rows_of_sequences_and_one_number(problem):
    """(B, T) temperatures that are all alike are one temperature."""
    x = problem
    leaves = x["hidden"][:22].view(2, 11, HIDDEN), x["weight"], x["targets"][:22].view(2, 11)
    alike = linear_logprobs(*leaves, transform=LogitTransform(temperature=torch.full((2, 11), 0.7).to(leaves[0])))
    one = linear_logprobs(*leaves, transform=LogitTransform(temperature=0.7))
    torch.testing.assert_close(alike.logps, one.logps, rtol=1e-6, atol=1e-6)


def test_with_a_low_rank_term_and_a_tolerance(problem):
    """A tolerance computes exactly where tokens have temperatures, and the plan says why."""
    x, given = problem, LogitTransform(temperature=problem["temperature"])
    a, b = torch.randn(3, HIDDEN).to(x["hidden"]), torch.randn(VOCAB, 3).to(x["hidden"])
    common = {"mask": x["mask"], "transform": given, "entropy": True, "grad_tolerance": 0.1}
    adapted = linear_logprobs(x["hidden"], x["weight"], x["targets"], low_rank=[LowRank(a=a, b=b)], **common)
    merged = linear_logprobs(x["hidden"], x["weight"] + b @ a, x["targets"], **common)
    torch.testing.assert_close(adapted.logps, merged.logps, rtol=1e-4, atol=1e-4)
    close(found(x, linear_logprobs(x["hidden"], x["weight"], x["targets"], **common)), truth(x))
    plan = plan_linear_logprobs(4096, VOCAB, HIDDEN, transform=given, grad_tolerance=0.1)
    assert plan.path == "two passes"
    assert "one temperature for all tokens" in plan.reason


def test_bad_temperatures(problem):
    x = problem
    given = x["hidden"], x["weight"], x["targets"]
    for bad in (0.0, -1.0, math.nan, math.inf):
        temperature = torch.ones(TOKENS).to(x["hidden"])
        temperature[3] = bad
        with pytest.raises(ValueError, match="temperature must be positive and finite at each token; 1 are not"):
            linear_logprobs(*given, transform=LogitTransform(temperature=temperature))
        support = Support.from_vllm([[1]] * TOKENS, device=x["hidden"].device)
        with pytest.raises(ValueError, match="temperature must be positive and finite at each token; 1 are not"):
            linear_logprobs(*given, transform=LogitTransform(temperature=temperature), support=support)
        logits = torch.zeros(TOKENS, VOCAB).to(x["hidden"])
        with pytest.raises(ValueError, match="temperature must be positive and finite at each token; 1 are not"):
            logits_logprobs(logits, x["targets"], transform=LogitTransform(temperature=temperature))
    with pytest.raises(ValueError, match=r"temperature must be a number or \(23,\) from targets, got \(22,\)"):
        linear_logprobs(*given, transform=LogitTransform(temperature=torch.ones(22)))
    with pytest.raises(ValueError, match=r"temperature must be a number or \(23,\) from targets, got \(22,\)"):
        logits_logprobs(
            torch.zeros(23, 5), torch.zeros(23).long(), transform=LogitTransform(temperature=torch.ones(22))
        )
    with pytest.raises(TypeError, match="temperature must be a number or a float tensor"):
        LogitTransform(temperature=torch.ones(23).long())
    with pytest.raises(ValueError, match="temperature must require no gradient"):
        LogitTransform(temperature=torch.ones(23, requires_grad=True))
    with pytest.raises(ValueError, match=r"temperature must be a number, \(B, T\) or \(N,\)"):
        LogitTransform(temperature=torch.ones(()))
    with pytest.raises(ValueError, match='passes="one" needs one temperature for all tokens'):
        FusedLinearGRPOLoss("dapo", passes="one", temperature=torch.ones(TOKENS).to(x["hidden"]))(
            *given, torch.ones(TOKENS).to(x["hidden"])
        )
