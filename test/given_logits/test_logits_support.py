"""logits_logprobs over listed ids, beside float64 logits that are masked elsewhere."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import oracles
from devices import skip_without_interpreter
from host_reads import host_reads
from liger_rl import LogitTransform, Support, logits_logprobs
from liger_rl.given_logits import support as module
from liger_rl.kernels import support as plain
from liger_rl.kernels import support_triton

TRANSFORMS = [{}, {"temperature": 0.7}, {"temperature": 1.6, "softcap": 2.0, "scale": 1.7}]


@pytest.fixture(params=[plain, support_triton], ids=["eager", "triton"])
def kernels(request, device, monkeypatch):
    if device.type == "cuda" and request.param is plain:
        monkeypatch.setattr(module, "kernels_for", lambda _: plain)
    if request.param is support_triton:
        skip_without_interpreter(device)
    if device.type == "cpu":
        monkeypatch.setattr(module, "kernels_for", lambda _: request.param)
    return request.param


def rows_of(sizes: list[int], vocab: int) -> list[list[int]]:
    return [torch.randint(vocab, (size,)).tolist() for size in sizes]  # some repeat an id


def allowed(rows: list[list[int]], targets: Tensor, vocab: int) -> Tensor:
    """(..., V) bool: the ids of each row and its target; all of an empty row."""
    flat = targets.reshape(-1).tolist()
    found = torch.zeros(len(rows), vocab, dtype=torch.bool)
    for t, row in enumerate(rows):
        found[t, [*row, *([flat[t]] if 0 <= flat[t] < vocab else [])] if row else slice(None)] = True
    return found.view(*targets.shape, vocab).to(targets.device)


def truth(logits: Tensor, targets: Tensor, mask: Tensor, inside: Tensor, g: Tensor, e: Tensor, transform: dict):
    """float64: (logps, entropy, gradient), 0 at tokens that do not count."""
    leaf = logits.detach().double().requires_grad_()
    # Before any arithmetic, because what is masked may not be finite.
    used = torch.where(mask[..., None] & inside, leaf, 0.0)
    z = oracles.transformed(used, **transform)
    log_p = z.masked_fill(~inside, -1e30).log_softmax(-1)
    logps = log_p.gather(-1, torch.where(mask, targets, 0).long()[..., None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e3)).sum(-1)
    logps, entropy = torch.where(mask, logps, 0.0), torch.where(mask, entropy, 0.0)
    (logps * g + entropy * e).sum().backward()
    return logps.detach(), entropy.detach(), leaf.grad


def compare(logits, targets, rows, *, mask=None, transform=None, support=None, **options):
    """Values and gradients of a random functional, beside the truth; -> what was found, and the gradient."""
    transform = transform or {}
    vocab = logits.shape[-1]
    counts = (targets >= 0) & (torch.ones_like(targets, dtype=torch.bool) if mask is None else mask)
    g, e = torch.randn(2, *targets.shape, device=logits.device)
    logps, entropy, grad = truth(logits, targets, counts, allowed(rows, targets, vocab), g, e, transform)
    leaf = logits.detach().requires_grad_()
    given = Support.from_vllm(rows, device=logits.device) if support is None else support
    found = logits_logprobs(
        leaf, targets, mask=mask, support=given, entropy=True, transform=LogitTransform(**transform), **options
    )
    (found.logps * g + found.entropy * e).sum().backward()
    assert found.logps.dtype == found.entropy.dtype == torch.float32
    assert leaf.grad.dtype == logits.dtype
    torch.testing.assert_close(found.logps.double(), logps, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=1e-5, atol=5e-6)
    eps = torch.finfo(logits.dtype).eps
    torch.testing.assert_close(leaf.grad.double(), grad, rtol=max(1e-5, eps), atol=5e-6)
    assert (leaf.grad[grad == 0] == 0).all()
    return found, leaf.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_values_and_gradients(kernels, dtype, transform, device):
    vocab = 90
    sizes = [1, 2, 7, 30, 0, 3, 1, 0, vocab, 4]
    rows = rows_of(sizes, vocab)
    targets = torch.tensor([row[-1] if row else 5 for row in rows], device=device)
    targets[5] = (set(range(vocab)) - set(rows[5])).pop()
    logits = (3 * torch.randn(len(rows), vocab)).to(device, dtype)
    found, grad = compare(logits, targets, rows, transform=transform)
    assert found.missing_target.nonzero().flatten().tolist() == [5]
    assert not any(found[2:5])
    single = [t for t, row in enumerate(rows) if set(row) == {int(targets[t])}]
    assert {0, 6} <= set(single)
    for values in (found.logps, found.entropy, grad):
        assert (values[single] == 0).all()


def test_a_temperature_for_each_token(kernels, device):
    rows = rows_of([1, 2, 7, 0, 3, 0], 40)
    targets = torch.tensor([row[0] if row else 3 for row in rows], device=device)
    logits = 3 * torch.randn(6, 40, device=device)
    support, g = Support.from_vllm(rows, device=device), torch.randn(2, 6, device=device)
    temperatures = 0.5 + torch.rand(6, device=device)
    results = []
    for each in (False, True):
        leaf = logits.clone().requires_grad_()
        if each:
            transform = LogitTransform(softcap=4.0, temperature=temperatures)
            found = logits_logprobs(leaf, targets, entropy=True, support=support, transform=transform)
            values = [found.logps, found.entropy]
        else:
            parts = [
                logits_logprobs(
                    leaf[t][None], targets[t][None], entropy=True, support=support.take(slice(t, t + 1), batch=6),
                    transform=LogitTransform(softcap=4.0, temperature=float(temperatures[t])),
                )
                for t in range(6)
            ]  # fmt: skip
            values = [torch.cat([part[i] for part in parts]) for i in range(2)]
        (torch.stack(values) * g).sum().backward()
        results.append([*(value.detach() for value in values), leaf.grad])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [[0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [2, 9, 0, 4, 1, 5]], ids=str)
def test_sliced_logits_of_three_dimensions_and_a_mask(kernels, sizes, device):
    """What is masked may hold anything; a slice is not copied."""
    logits = 3 * torch.randn(2, 4, 40, device=device)
    rows = rows_of(sizes, 40)
    targets = torch.tensor([row[0] if row else 3 for row in rows], device=device).view(2, 3)
    mask = torch.tensor([[True, True, True], [True, False, True]], device=device)
    targets[1, 1] = 10**6
    logits[1, 1] = math.nan
    targets[0, 1] = -100
    logits[0, 1] = math.inf
    found, _ = compare(logits[:, :-1], targets, rows, mask=mask)
    assert found.logps.shape == found.entropy.shape == found.missing_target.shape == (2, 3)
    with pytest.raises(ValueError, match=r"targets must be token ids in \[0, 40\) from logits"):
        logits_logprobs(logits[:, :-1], targets, support=Support.from_vllm(rows, device=device))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_support(data):
    vocab = data.draw(st.integers(1, 12))
    rows = data.draw(st.lists(st.lists(st.integers(0, vocab - 1), max_size=9), max_size=6))
    n = len(rows)
    targets = torch.tensor(data.draw(st.lists(st.integers(-1, vocab - 1), min_size=n, max_size=n)), dtype=torch.int64)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=torch.bool)
    compare(2 * torch.randn(n, vocab), targets, rows, mask=mask, transform=data.draw(st.sampled_from(TRANSFORMS)))


def test_the_whole_vocabulary_is_no_support(device):
    """Empty rows give the bits of a call without a support."""
    logits, targets = torch.randn(5, 300, device=device), torch.randint(300, (5,), device=device)
    results = []
    for support in (None, Support.from_vllm([[]] * 5, device=device)):
        leaf = logits.clone().requires_grad_()
        found = logits_logprobs(leaf, targets, entropy=True, support=support)
        (found.logps.sum() + found.entropy.sum()).backward()
        results.append((found.logps, found.entropy, leaf.grad))
    for with_rows, without in zip(*results, strict=True):
        assert torch.equal(with_rows, without)


def test_infinite_logits(kernels, device):
    """A listed id that cannot be drawn, and large logits that are not listed."""
    logits = torch.randn(3, 20, device=device)
    logits[:, 4], logits[:, 5] = -math.inf, 1e4
    found = logits_logprobs(
        logits.requires_grad_(),
        torch.tensor([1, 2, 3], device=device),
        entropy=True,
        support=Support.from_vllm([[1, 4], [2, 4, 7], [3, 4, 9]], device=device),
    )
    (found.logps.sum() + found.entropy.sum()).backward()
    assert found.logps[0] == 0
    assert all(values.isfinite().all() for values in (found.logps, found.entropy, logits.grad))
    assert (logits.grad[:, 4:6] == 0).all()


def test_only_one_of_the_gradients(device):
    logits, targets = torch.randn(4, 30, device=device), torch.randint(30, (4,), device=device)
    support = Support.from_vllm([[1, 2], [], [3], [4, 5, 6]], device=device)
    grads = []
    for pick in (lambda f: f.logps.sum(), lambda f: f.entropy.sum(), lambda f: f.logps.sum() + f.entropy.sum()):
        leaf = logits.clone().requires_grad_()
        found = logits_logprobs(leaf, targets, entropy=True, support=support)
        grads.append(torch.autograd.grad(pick(found), leaf, retain_graph=True)[0])
        assert torch.equal(torch.autograd.grad(pick(found), leaf)[0], grads[-1]), "a second backward"
    torch.testing.assert_close(grads[0] + grads[1], grads[2], rtol=1e-5, atol=1e-6)
    leaf = logits.clone().requires_grad_()
    found = logits_logprobs(leaf, targets, support=support)
    assert found.entropy is None
    (grad,) = torch.autograd.grad(found.logps.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        grad.sum().backward()


def test_fixed_shape_waits_for_nothing(monkeypatch, device):
    skip_without_interpreter(device)
    monkeypatch.setattr(module, "kernels_for", lambda _: support_triton)
    logits, targets = torch.randn(3, 30, device=device), torch.tensor([1, 7, 99], device=device)
    made = Support.from_vllm([[1, 2], [], [4]], device=device, may_be_empty=False)
    leaf = logits.requires_grad_()
    with host_reads(device) as reads:
        found = logits_logprobs(leaf, targets, entropy=True, fixed_shape=True, support=made)
        (found.logps.sum() + found.entropy.sum()).backward()
    # The interpreter reads every scalar that it loads.
    assert not [name for name in reads.names if device.type == "cuda" or name != "_local_scalar_dense"]
    assert (found.logps != 0).tolist() == [True, False, False]
    assert (leaf.grad != 0).nonzero().tolist() == [[0, 1], [0, 2]]


ROWS = [[1, 2], [3], []]


@pytest.mark.parametrize(
    ("support", "options", "error", "message"),
    [
        ([[1]], {}, TypeError, "support must be a Support or None, got list"),
        (Support.from_vllm([[1]]), {}, ValueError, "row for each of the 3 tokens of targets, got 1 rows"),
        (Support.from_vllm(ROWS), {"in_place": True}, ValueError, "in_place and grad_buffer must be left out with a"),
        (Support.from_vllm(ROWS), {"grad_buffer": torch.zeros(3, 9)}, ValueError, "in_place and grad_buffer must be"),
        (Support.from_vllm(ROWS), {"fixed_shape": True}, ValueError, "may_be_empty=False for fixed_shape"),
        (Support.from_vllm([[1], [9], [2]]), {}, ValueError, r"token_ids must be token ids in \[0, 9\) .*, got 9"),
        (Support.from_vllm(ROWS, may_be_empty=False), {}, ValueError, "no empty row with may_be_empty=False; 1 tokens"),
        (Support.from_vllm([[1], [2], [2]], missing_target="error"), {}, ValueError, "missing_target='error'; 2 of"),
    ],
)
def test_bad_input(support, options, error, message):
    with pytest.raises(error, match=message):
        logits_logprobs(torch.randn(3, 9), torch.tensor([1, 3, 5]), support=support, **options)


def test_torch_compile_is_refused():
    torch._dynamo.reset()
    support = Support.from_vllm(ROWS)

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(logits, targets):
        return logits_logprobs(logits, targets, support=support).logps

    with pytest.raises(Exception, match=r"support must be None under torch\.compile"):
        compiled(torch.randn(3, 9), torch.tensor([1, 3, 5]))
