"""Options of the head that change how, not what is computed: `fixed_shape`, `batch_invariant`, `weight_grad`, and a
temperature for each token. Their values are the fuzzer's, properties of every call test_properties.py's.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from devices import NEEDS_GPU
from head_calls import (
    Problem,
    Products,
    assert_close,
    batch,
    call,
    finish,
    functional,
    problem,
    run_triton,
    solve,
    truth,
)
from host_reads import host_reads
from liger_rl import (
    PRESETS,
    FusedLinearGRPOLoss,
    LogitTransform,
    Segments,
    Support,
    TopEntropyMask,
    grpo_loss_from_logits,
    linear_logprobs,
    plan_linear_logprobs,
)
from liger_rl.kernels.statistics import EXTRAS

# --- losses with fixed_shape never wait for the device ----------------------------------------------------------------

LOSSES = {name: {"loss_type": name, "beta": 0.1} for name in PRESETS if name not in ("dr_grpo", "dro")}
LOSSES["metrics, entropy"] = {
    "loss_type": "dapo",
    "metrics": "with_entropy",
    "entropy_coef": 0.1,
    "corrections": [TopEntropyMask(top_entropy_quantile=0.5)],
}
LOSSES["packed"] = {"loss_type": "gspo", "metrics": "basic"}


@pytest.mark.parametrize("name", [*LOSSES, "from logits"])
def test_losses_never_wait(name, device):
    packed = name == "packed"
    x = batch((24,) if packed else (3, 7), device=device).leaves(("hidden", "weight", "logits"))
    shape = x.mask.shape
    columns = {"old_per_token_logps": torch.full(shape, -4.0, device=device)}
    columns["ref_per_token_logps"] = torch.full(shape, -4.5, device=device)
    if packed:
        columns["segments"] = Segments(index=torch.arange(24, device=device) // 6, count=4)

    def loss():
        given = x.targets, x.advantages, x.mask
        if name == "from logits":
            return grpo_loss_from_logits(x.logits, *given, beta=0.1, fixed_shape=True, **columns).loss.sum()
        return FusedLinearGRPOLoss(**LOSSES[name], fixed_shape=True)(x.hidden, x.weight, *given, **columns).loss

    loss().backward()  # compiles what there is to compile
    with host_reads(device) as reads:
        value = loss()
        value.backward()
    assert reads.names == []
    assert value.isfinite()


@NEEDS_GPU
@pytest.mark.parametrize("tolerance", [0.0, 1e-2])
def test_host_reads_at_the_size_of_a_training_step(tolerance):
    device = torch.device("cuda")
    x = batch((4, 512), 256, 5000, torch.bfloat16, device).leaves(("hidden", "weight"))

    def logps():
        return linear_logprobs(x.hidden, x.weight, x.targets, mask=x.mask, grad_tolerance=tolerance).logps

    functional(logps()).backward()
    with host_reads(device) as forward:
        values = logps()
    total = functional(values)
    with host_reads(device) as backward:
        total.backward()
    assert len(forward.names) == 1
    assert len(backward.names) == 1


# --- with batch_invariant a token's bits are the same in any company --------------------------------------------------

INVARIANT = 300  # tokens: more than a tile has


def biased(dtype=torch.float32, device="cpu", *, tokens=INVARIANT, vocab=1003) -> Problem:
    return problem((tokens,), 96, vocab, dtype, device, bias=True)


def invariant(inputs: Problem, tokens: Tensor | slice = slice(None), **options):
    """Of some of the tokens, in any order."""
    some = inputs._replace(hidden=inputs.hidden[tokens], targets=inputs.targets[tokens])
    return call(some, batch_invariant=True, **options)


def assert_identical(found, expected, place=slice(None)) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            assert torch.equal(mine, other[place])


ALL = {"entropy": True, "lse": True, "extras": set(EXTRAS)}


def companies(tokens: int, number: int):
    """-> tokens, cut or permuted, and a mask: alone (None), padded to two rows, or chosen among all by the mask."""
    g = torch.Generator().manual_seed(11)
    for place in range(number):
        first, last = sorted(torch.randint(tokens, (2,), generator=g).tolist())
        chosen = torch.arange(first, last + 1) if place % 4 else torch.randperm(tokens, generator=g)[: last + 1]
        mask = None
        if place % 3 == 1:
            mask = torch.arange(len(chosen) + len(chosen) % 2 + 2).view(2, -1) < len(chosen)
            chosen = mask.long().masked_scatter(mask, chosen)
        elif place % 3 == 2:
            mask, chosen = torch.zeros(tokens, dtype=torch.bool).index_fill(0, chosen, True), torch.arange(tokens)
        yield chosen, mask


@pytest.mark.parametrize("path", ["tiles", "epilogue", "support"])
@pytest.mark.parametrize("heat", ["none", "one", "each"])
def test_cut_permuted_padded_and_masked_in_many_ways(path, heat, monkeypatch):
    """The product's epilogue runs on a GPU, and in Triton's interpreter for fewer tokens in fewer ways."""
    on_gpu = torch.cuda.is_available()
    tokens, number, vocab = 5000 if on_gpu else 300, 200, 20000 if on_gpu else 1003
    dtype = torch.bfloat16 if on_gpu and path == "epilogue" else torch.float32
    if path == "epilogue" and not on_gpu:
        run_triton(monkeypatch, epilogue=True)
        tokens, number, vocab, dtype = 20, 12, 600, torch.float16
    inputs = biased(dtype, "cuda" if on_gpu else "cpu", tokens=tokens, vocab=vocab)
    device = inputs.hidden.device
    lists = torch.randint(vocab, (tokens, 30), device=device)
    heats = torch.rand(tokens, device=device) + 0.5
    options = {name: value for name, value in ALL.items() if path != "support" or name != "lse"}

    def found(rows, mask=None):
        some = inputs._replace(hidden=inputs.hidden[rows], targets=inputs.targets[rows])
        transform = LogitTransform(temperature=0.7 if heat == "one" else heats[rows], softcap=4.0)
        transform = LogitTransform() if heat == "none" else transform
        support = Support.from_padded(lists[rows].flatten(0, -2)) if path == "support" else None
        return call(some, batch_invariant=True, mask=mask, transform=transform, support=support, **options)

    whole = found(torch.arange(tokens, device=device))
    for rows, mask in companies(tokens, number):
        rows, mask = rows.to(device), None if mask is None else mask.to(device)
        counted = slice(None) if mask is None else mask
        mine = [None if values is None else values[counted] for values in found(rows, mask)]
        assert_identical(mine, whole, rows[counted])


@NEEDS_GPU
@pytest.mark.parametrize("kind", ["graph", "compile"])
def test_invariant_in_a_graph(kind):
    inputs = biased(torch.bfloat16, "cuda", tokens=700, vocab=20000)
    whole = invariant(inputs, entropy=True, fixed_shape=True)
    few = slice(5, 90)
    some = inputs._replace(hidden=inputs.hidden[few].clone(), targets=inputs.targets[few].clone())
    if kind == "compile":
        found = torch.compile(lambda: invariant(some, entropy=True, fixed_shape=True))()
    else:
        invariant(some, entropy=True, fixed_shape=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = invariant(some, entropy=True, fixed_shape=True)
        graph.replay()
    assert_identical(found, whole, few)


def test_every_product_has_one_shape():
    """What the promise rests on where libraries multiply."""
    with Products() as products:
        for tokens in (1, 77, 128, 300):
            invariant(biased(), slice(tokens))
    assert len({(a.shape, b.shape) for a, b in products.factors}) == 1


def test_a_loss_takes_it():
    inputs = biased()
    loss = FusedLinearGRPOLoss("grpo", batch_invariant=True)
    reference = loss.reference_logps(inputs.hidden, inputs.weight, inputs.targets, bias=inputs.bias)
    assert torch.equal(reference[5:6], invariant(inputs, slice(5, 6)).logps)


# --- the weight's gradient added to a float32 tensor in place ---------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 2])
def test_it_may_be_the_weights_own_gradient(rank, device):
    inputs = problem(rank=rank, device=device)
    leaves = inputs.leaves()
    place = leaves.weight.grad = torch.ones((129, 16), device=device)
    functional(*call(leaves, entropy=True, weight_grad=place)[:2]).backward()
    assert leaves.weight.grad is place
    torch.testing.assert_close(place, solve(inputs).grads["weight"] + 1, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("of", ["weight", "hidden", "bias"])
@pytest.mark.parametrize("through", ["log-probabilities", "loss"])
def test_memory_of_an_input_is_refused(of, through):
    memory = torch.randn(200, 16)
    parts = {"weight": memory[:129], "hidden": memory[:15], "bias": memory.flatten()[:129]}
    inputs = {"weight": torch.randn((129, 16)), "hidden": torch.randn(15, 16), "bias": torch.randn(129), of: parts[of]}
    inputs = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    before, targets = memory.clone(), torch.arange(15)
    function: Callable = linear_logprobs
    if through == "loss":
        function = partial(FusedLinearGRPOLoss("gpg"), advantages=torch.ones(3))
        inputs["hidden"] = inputs["hidden"].view(3, 5, 16)
        targets = targets.view(3, 5)
    ids = {"targets" if through == "log-probabilities" else "selected_token_ids": targets}
    with pytest.raises(ValueError, match=rf"weight_grad must have memory of its own.*overlaps {of}"):
        function(**inputs, **ids, weight_grad=memory[:129])
    assert torch.equal(memory, before)


# --- a temperature for each token -------------------------------------------------------------------------------------


def test_a_tolerance_computes_exactly(device):
    """And the plan says why."""
    transform = LogitTransform(temperature=0.5 + torch.rand(23, device=device))
    leaves = [problem((23,), device=device).leaves() for _ in range(2)]
    options = {"transform": transform, "entropy": True}
    found, exact = (finish(call(x, **options, grad_tolerance=t), x) for x, t in zip(leaves, (0.1, 0.0), strict=True))
    assert_close(found, exact, 1e-6)
    plan = plan_linear_logprobs(4096, 129, 16, device="cuda", transform=transform, grad_tolerance=0.1)
    assert plan.path == "two passes"
    assert "one temperature for all tokens" in plan.reason


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_in_the_products_epilogue(softcap, monkeypatch):
    """Forward and backward without tiles of logits: the float64 values, and gradients beside those of tiles."""
    on_gpu = torch.cuda.is_available()
    dtype, tokens = (torch.bfloat16, 900) if on_gpu else (torch.float16, 9)
    if not on_gpu:
        run_triton(monkeypatch, epilogue=True)
    epilogue = pytest.importorskip("liger_rl.kernels.epilogue")
    inputs = problem((tokens,), 64, 700, dtype, "cuda" if on_gpu else "cpu", bias=True)
    heats = torch.rand(tokens, device=inputs.hidden.device) + 0.4
    transform = LogitTransform(temperature=heats, softcap=softcap)
    folds, gradients = [], []
    for name, calls in (("gemm_state", folds), ("gemm_grad", gradients)):
        kernel = getattr(epilogue, name)
        monkeypatch.setattr(
            epilogue, name, lambda *a, kernel=kernel, calls=calls, **k: calls.append(1) or kernel(*a, **k)
        )
    found = solve(inputs, transform=transform)
    assert folds
    assert gradients
    exact = truth(inputs, temperature=heats[:, None].double(), softcap=softcap)
    tiles = solve(inputs, transform=transform, chunk_vocab=700)
    assert len(folds) == 1
    torch.testing.assert_close(found[0].double(), exact[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1].double(), exact[1], rtol=1e-4, atol=1e-4)
    for name, mine in found[-1].items():
        expected = exact[-1][name]
        error, other = ((x[-1][name].double() - expected).norm() / expected.norm() for x in (found, tiles))
        assert mine is not None
        assert error < 2 * other + 1e-3
