"""Plans: what they predict bounds what is measured, budgets are kept, and what does not fit is refused."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor

from devices import NEEDS_GPU
from liger_rl import (
    FusedLinearGRPOLoss,
    LogitTransform,
    LowRank,
    Reinforce,
    TokenSum,
    linear_logprobs,
    plan_linear_logprobs,
)
from liger_rl import logprobs as room
from liger_rl.head.engines.two_pass import ProjectionOptions
from liger_rl.head.memory import LIBRARY_BYTES
from liger_rl.kernels import gemm
from liger_rl.kernels.block_plan import BlockPlan
from liger_rl.kernels.devices import BLOCKS_BYTES
from liger_rl.kernels.statistics import BLOCK_TOKENS, BLOCK_VOCAB

TOKENS, HIDDEN, VOCAB = 600, 160, 1899  # with masked ones left out, enough for the epilogue
CASES = {
    "plain": {},
    "entropy": {"entropy": True},
    "bias, transform": {"bias": True, "transform": LogitTransform(temperature=0.7, softcap=5.0)},
    "everything": {
        "bias": True,
        "entropy": True,
        "extras": ("is_top1", "mean_logits", "log_sum_sq_probs"),
        "transform": LogitTransform(temperature=0.7, softcap=5.0, scale=2.0),
    },
    "frozen weight": {"frozen": "weight"},
    "frozen hidden": {"frozen": "hidden"},
    "fixed shape": {"fixed_shape": True},
    "batch invariant": {"batch_invariant": True},
    "chunks": {"chunk_tokens": 200, "chunk_vocab": 700},
    "tolerance": {"grad_tolerance": 0.05},
    "small tolerance": {"grad_tolerance": 0.013},  # keeps many blocks
    "in place": {"weight_grad": True},
    "low rank": {"rank": 3},
}


class Peak:
    bytes = 0


@contextmanager
def tensor_peak(device: torch.device) -> Iterator[Peak]:
    """Peak of the bytes that tensors take above those at entry."""
    peak = Peak()
    # On CPU many small operations would each wait for all threads, of which a host may have more than cores.
    threads = torch.get_num_threads()
    gc.disable()  # old garbage would be freed while new memory is counted
    torch.set_num_threads(1)
    try:
        with _cuda_peak(peak) if device.type == "cuda" else _cpu_peak(peak):
            yield peak
    finally:
        torch.set_num_threads(threads)
        gc.enable()


@contextmanager
def _cuda_peak(peak: Peak) -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    torch.cuda.synchronize()
    peak.bytes = torch.cuda.max_memory_allocated() - before


@contextmanager
def _cpu_peak(peak: Peak) -> Iterator[None]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield
    assert profile.profiler is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak.bytes = max(peak.bytes, held)


def run(case: dict, device: torch.device, dtype: torch.dtype, *, shape=(TOKENS, VOCAB, HIDDEN), masked=True, **more):
    """-> (the plan, peak of the forward, peak of the backward), both beside results and gradients."""
    tokens, vocab, hidden_size = shape
    options = dict(case)
    frozen, rank, bias = options.pop("frozen", None), options.pop("rank", 0), options.pop("bias", False)
    in_place = options.pop("weight_grad", False)
    leaves = {"hidden": torch.randn(tokens, hidden_size), "weight": torch.randn(vocab, hidden_size) / hidden_size**0.5}
    if bias:
        leaves["bias"] = torch.randn(vocab)
    leaves = {name: t.to(device, dtype).requires_grad_(name != frozen) for name, t in leaves.items()}
    terms = []
    if rank:
        a, b = torch.randn(rank, hidden_size), torch.randn(vocab, rank)
        terms = [LowRank(a=a.to(device, dtype).requires_grad_(), b=b.to(device, dtype).requires_grad_())]
    targets = torch.randint(vocab, (tokens,), device=device)
    total = torch.zeros(vocab, hidden_size, device=device) if in_place else None
    mask = torch.arange(tokens, device=device) % 9 != 0 if masked else None
    plan = plan_linear_logprobs(
        *shape,
        dtype=dtype,
        device=device,
        needs=(frozen != "hidden", frozen != "weight"),
        masked=masked,
        bias=bias,
        rank=rank,
        weight_grad=in_place,
        **options,
        **more,
    )

    def forward():
        head = leaves.get("bias")
        return linear_logprobs(
            leaves["hidden"], leaves["weight"], targets, mask=mask, bias=head, low_rank=terms, weight_grad=total,
            **options, **more,
        )  # fmt: skip

    def loss(out) -> Tensor:
        return out.logps.sum() if out.entropy is None else (out.logps + out.entropy).sum()

    everything = [*leaves.values(), *(factor for term in terms for factor in (term.a, term.b))]
    if device.type == "cuda":
        loss(forward()).backward()  # compiles what there is to compile, and lets libraries take what they keep
        for leaf in everything:
            leaf.grad = None
    with tensor_peak(device) as first:
        out = forward()
    value = loss(out)
    with tensor_peak(device) as second:
        value.backward()
    results = sum(leaf.grad.nbytes for leaf in everything if leaf.grad is not None)
    return plan, first.bytes, second.bytes - results


@pytest.mark.parametrize(
    ("dtype", "masked"), [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)], ids=str
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_prediction_bounds_the_peak(case, dtype, masked, device):
    plan, forward, backward = run(case, device, dtype, masked=masked)
    assert forward <= plan.forward.extra_bytes
    assert backward <= plan.backward.extra_bytes
    if device.type == "cpu":  # or the bound would say nothing
        assert max(forward, backward) >= plan.extra_bytes / 4


BUDGETED = {name: case for name, case in CASES.items() if name != "chunks"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", BUDGETED.values(), ids=BUDGETED)
def test_a_budget_is_kept(case, dtype):
    """The least that there is."""
    device = torch.device("cpu")
    options = {k: v for k, v in case.items() if k not in ("frozen", "bias", "rank")}
    known = {"bias": case.get("bias", False), "rank": case.get("rank", 0)}
    needs = (case.get("frozen") != "hidden", case.get("frozen") != "weight")
    least = plan_linear_logprobs(
        TOKENS, VOCAB, HIDDEN, dtype=dtype, device=device, needs=needs, **known, **options
    ).least_bytes
    plan, forward, backward = run(case, device, dtype, max_extra_bytes=least)
    assert max(forward, backward) <= plan.extra_bytes <= least


@NEEDS_GPU
@pytest.mark.parametrize("budget", [None, 200 << 20])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_prediction_at_the_size_of_a_training_step(case, budget):
    if budget is not None and ("chunk_vocab" in case):
        pytest.skip("chunks and a budget exclude each other")
    more = {} if budget is None else {"max_extra_bytes": budget}
    plan, forward, backward = run(case, torch.device("cuda"), torch.bfloat16, shape=(4096, 32000, 2048), **more)
    assert forward <= plan.forward.extra_bytes
    assert backward <= plan.backward.extra_bytes
    assert budget is None or plan.extra_bytes <= budget


def test_a_budget_changes_tiles_and_not_results():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(300, 64, generator=generator), torch.randn(2000, 64, generator=generator) / 8
    targets = torch.randint(2000, (300,), generator=generator)
    sizes = []

    def spied(*args, **options):
        sizes.append(plan_linear_logprobs(*args, **options).tiles)
        return plan_linear_logprobs(*args, **options)

    results = []
    with mock.patch.object(room, "plan_linear_logprobs", spied):
        for budget in (None, 3 << 19, 1 << 26):
            leaf = hidden.clone().requires_grad_()
            out = linear_logprobs(leaf, weight, targets, entropy=True, max_extra_bytes=budget)
            (out.logps + out.entropy).sum().backward()
            results.append([out.logps.detach(), out.entropy.detach(), leaf.grad])
    assert sizes[0].vocab < sizes[1].vocab == 2000
    for other in results[1:]:
        for mine, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(mine, expected)


def test_too_small_a_budget_says_what_is_needed():
    hidden, weight = torch.randn(64, 32), torch.randn(1000, 32)
    targets = torch.zeros(64, dtype=torch.long)
    needed = plan_linear_logprobs(64, 1000, 32, dtype=torch.float32, device="cpu", needs=(False, False)).least_bytes
    with pytest.raises(ValueError, match=rf"max_extra_bytes must be at least {needed} .*; got {needed - 1}"):
        linear_logprobs(hidden, weight, targets, max_extra_bytes=needed - 1)
    linear_logprobs(hidden, weight, targets, max_extra_bytes=needed)
    loss = FusedLinearGRPOLoss(max_extra_bytes=1000)
    with pytest.raises(ValueError, match="max_extra_bytes must be at least"):
        loss(hidden[None], weight, targets[None], torch.ones(1))


LAYOUTS = {
    "transposed": lambda t: t.T.contiguous().T,
    "every other column": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "every other row": lambda t: t.repeat_interleave(2, 0)[::2],
    "batch second": lambda t: t.view(6, -1, t.shape[1]).transpose(0, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("passes", ["two", "one"])
@pytest.mark.parametrize(
    ("of_hidden", "of_weight"),
    [(name, None) for name in LAYOUTS] + [(None, name) for name in LAYOUTS if name != "batch second"],
)
def test_a_budget_is_kept_with_any_strides(of_hidden, of_weight, passes, masked, dtype):
    """Few words for large hidden states, or many words for few tokens, so that copies are what a budget is short of."""
    tokens, vocab, size = (600, 300, 512) if of_hidden else (30, 4000, 128)
    hidden, weight = torch.randn(tokens, size).to(dtype), torch.randn(vocab, size).to(dtype)
    hidden = LAYOUTS[of_hidden](hidden) if of_hidden else hidden
    weight = LAYOUTS[of_weight](weight) if of_weight else weight
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    contiguous = hidden.is_contiguous(), weight.is_contiguous()
    assert contiguous == (of_hidden is None, of_weight is None)
    given = {"dtype": dtype, "device": "cpu", "passes": passes, "contiguous": contiguous}
    plan = plan_linear_logprobs(tokens, vocab, size, **given)
    budget = plan.least_bytes if passes == "two" else plan.one_pass_bytes
    targets = torch.randint(vocab, hidden.shape[:-1])
    mask = torch.rand(targets.shape) < 0.9 if masked else None
    loss = FusedLinearGRPOLoss(Reinforce(), reduction=TokenSum(), passes=passes, max_extra_bytes=budget)
    with tensor_peak(torch.device("cpu")) as first:
        value = loss(hidden, weight, targets, torch.ones(targets.shape), mask).loss
    kept_results = hidden.nbytes + weight.nbytes if passes == "one" else 0
    with tensor_peak(torch.device("cpu")) as second:
        value.backward()
    results = 0 if passes == "one" else hidden.grad.nbytes + weight.grad.nbytes
    assert first.bytes - kept_results <= budget
    assert second.bytes - results <= budget


@pytest.mark.parametrize("of_hidden", LAYOUTS)
def test_a_budget_of_a_forward_alone_is_kept_with_any_strides(of_hidden):
    tokens, vocab, size = 1200, 16, 512
    hidden, weight = LAYOUTS[of_hidden](torch.randn(tokens, size)), torch.randn(vocab, size)
    given = {"dtype": torch.float32, "device": "cpu", "needs": (False, False), "contiguous": (False, True)}
    budget = plan_linear_logprobs(tokens, vocab, size, **given).least_bytes
    targets = torch.randint(vocab, hidden.shape[:-1])
    with tensor_peak(torch.device("cpu")) as peak:
        linear_logprobs(hidden, weight, targets, mask=torch.rand(targets.shape) < 0.95, max_extra_bytes=budget)
    assert peak.bytes <= budget


@pytest.mark.parametrize(
    ("name", "error", "options"),
    [
        ("tokens", ValueError, {"tokens": -1}),
        ("tokens", TypeError, {"tokens": 8.0}),
        ("vocab", ValueError, {"vocab": 0}),
        ("hidden_size", ValueError, {"hidden_size": 0}),
        ("hidden_size", TypeError, {"hidden_size": True}),
        ("dtype", TypeError, {"dtype": torch.int64}),
        ("dtype", TypeError, {"dtype": "bfloat16"}),
        ("dtype", TypeError, {"dtype": None}),
        ("weight_dtype", TypeError, {"weight_dtype": torch.float64}),
        ("compute_dtype", TypeError, {"compute_dtype": 16}),
        ("device", ValueError, {"device": "gpu"}),
        ("device", TypeError, {"device": 1.5}),
        ("needs", TypeError, {"needs": True}),
        ("needs", TypeError, {"needs": (True, True, True)}),
        ("needs", TypeError, {"needs": (1, 0)}),
        ("contiguous", TypeError, {"contiguous": False}),
        ("masked", TypeError, {"masked": 1}),
        ("bias", TypeError, {"bias": torch.zeros(3)}),
        ("rank", ValueError, {"rank": -1}),
        ("rank", TypeError, {"rank": None}),
        ("weight_grad", TypeError, {"weight_grad": torch.zeros(3)}),
        ("transform", TypeError, {"transform": LogitTransform}),
        ("entropy", TypeError, {"entropy": "yes"}),
        ("extras", TypeError, {"extras": "is_top1"}),
        ("extras", ValueError, {"extras": ("perplexity",)}),
        ("grad_tolerance", ValueError, {"grad_tolerance": -1.0}),
        ("grad_tolerance", TypeError, {"grad_tolerance": None}),
        ("chunk_tokens", ValueError, {"chunk_tokens": 0}),
        ("chunk_vocab", TypeError, {"chunk_vocab": 1.0}),
        ("fixed_shape", TypeError, {"fixed_shape": 1}),
        ("batch_invariant", TypeError, {"batch_invariant": 1}),
        ("passes", ValueError, {"passes": ["two"]}),
        ("together", ValueError, {"together": 0}),
        ("together", TypeError, {"together": 1.5}),
    ],
)
def test_nonsense_is_named(name, error, options):
    with pytest.raises(error, match=rf"^{name}\b"):
        plan_linear_logprobs(**{"tokens": 8, "vocab": 40, "hidden_size": 16, "device": "cpu", **options})


def test_bad_budgets():
    for call in (FusedLinearGRPOLoss, lambda **o: plan_linear_logprobs(64, 1000, 32, **o)):
        with pytest.raises(TypeError, match="max_extra_bytes must be an int or None, got float"):
            call(max_extra_bytes=1e9)
        with pytest.raises(ValueError, match="give it or chunk_tokens and chunk_vocab, not both"):
            call(max_extra_bytes=1 << 30, chunk_vocab=512)


H200 = {"device": "cuda", "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("options", "path", "kernels"),
    [
        (H200, "two passes", ("epilogue", "epilogue")),
        (H200 | {"transform": LogitTransform(softcap=30.0)}, "two passes", ("epilogue", "epilogue")),
        (H200 | {"entropy": True}, "two passes", ("epilogue", "epilogue")),
        (H200 | {"chunk_vocab": 8192}, "two passes", ("tiles", "tiles")),
        (H200 | {"dtype": torch.float32}, "two passes", ("tiles", "tiles")),
        (H200 | {"grad_tolerance": 1e-3}, "block-sparse", ("epilogue", "blocks")),
        (H200 | {"grad_tolerance": 1e-3, "fixed_shape": True}, "two passes", ("epilogue", "epilogue")),
        (H200 | {"grad_tolerance": 1e-3, "dtype": torch.float32}, "two passes", ("tiles", "tiles")),
        (H200 | {"max_extra_bytes": 300 << 20}, "two passes", ("epilogue", "epilogue")),
        ({"device": "cpu", "dtype": torch.float32}, "two passes", ("tiles", "tiles")),
        ({"device": "cpu", "dtype": torch.float32, "grad_tolerance": 1e-3}, "two passes", ("tiles", "tiles")),
    ],
)
def test_the_rule(options, path, kernels):
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the plan is of another GPU")
    plan = plan_linear_logprobs(8192, 128256, 4096, masked=False, **options)
    assert (plan.path, (plan.forward.kernel, plan.backward.kernel)) == (path, kernels)
    assert plan.forward.flops == 2 * 8192 * 128256 * 4096
    assert plan.backward.flops == 3 * plan.forward.flops
    text = str(plan)
    assert path in text
    assert kernels[0] in text
    assert str(plan.least_bytes) in text


@pytest.mark.parametrize("budget", [None, 1 << 30, 300 << 20])
def test_kept_blocks_take_no_more_than_planned(budget):
    """Where half of the blocks are kept: in as many spans as the kernels are told to make."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from liger_rl.kernels import blocks_triton

    tokens, vocab, hidden_size = 8192, 128256, 2048
    plan = plan_linear_logprobs(tokens, vocab, hidden_size, **H200, grad_tolerance=1e-3, max_extra_bytes=budget)
    chunk_tokens, chunk_vocab = (None, None) if budget is None else plan.tiles
    options = ProjectionOptions(
        transform=LogitTransform(), entropy=False, compute_dtype=torch.bfloat16,
        chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab, kernels_fit=True,
    )  # fmt: skip
    of_block = BLOCK_TOKENS * BLOCK_VOCAB * 2
    counts = torch.full((-(-vocab // BLOCK_VOCAB),), tokens // BLOCK_TOKENS // 2)
    kept = int(counts.sum())
    blocks = BlockPlan(torch.empty(0), torch.empty(0), counts, kept, tokens)
    spans = blocks_triton._spans(blocks, options.blocks_bytes // of_block)
    assert [first for first, _, _ in spans] == [0, *(last for _, last, _ in spans[:-1])]
    assert all(total == counts[first:last].sum() for first, last, total in spans)
    held = max(total for _, _, total in spans)
    rows = 4 * tokens * hidden_size + 2 * tokens * hidden_size  # the sum of their gradient, and the live ones
    assert held * of_block + rows + LIBRARY_BYTES["cuda"] <= plan.backward.extra_bytes
    assert budget is None or plan.extra_bytes <= budget
    assert plan.path == "block-sparse"


def test_rows_in_an_order_of_their_own_are_planned():
    """A tolerance copies the hidden states, though no token is masked."""
    tokens, vocab, hidden_size = 32768, 128256, 8192
    plan = plan_linear_logprobs(
        tokens, vocab, hidden_size, **H200, masked=False, needs=(False, True), grad_tolerance=1e-3
    )
    assert 2 * tokens * hidden_size + BLOCKS_BYTES + LIBRARY_BYTES["cuda"] <= plan.backward.extra_bytes
    assert plan.path == "block-sparse"


def test_gradients_of_rows_in_an_order_of_their_own_are_planned():
    """Under autocast, without a mask: their float32 sum is there before the rows are put in order and converted."""
    tokens, vocab, hidden_size = 32768, 128256, 8192
    options = H200 | {"dtype": torch.float32, "weight_dtype": torch.bfloat16, "compute_dtype": torch.bfloat16}
    plan = plan_linear_logprobs(tokens, vocab, hidden_size, **options, masked=False, grad_tolerance=1e-3)
    assert (4 + 4 + 2) * tokens * hidden_size + LIBRARY_BYTES["cuda"] <= plan.backward.extra_bytes
    assert plan.path == "block-sparse"


def test_a_budget_under_the_epilogue_keeps_the_backward_exact():
    """Blocks are told apart by the epilogue alone."""
    options = H200 | {"grad_tolerance": 1e-3, "vocab": 128256, "hidden_size": 1024}
    least = plan_linear_logprobs(8192, **options).least_bytes
    plan = plan_linear_logprobs(8192, **options, max_extra_bytes=least)
    assert (plan.path, plan.backward.kernel, plan.kernels_fit) == ("two passes", "tiles", False)
    assert "does not fit" in plan.reason


def test_fixed_shapes_of_the_forward_leave_the_backward_its_budget():
    """The sum of the weight's gradient over a tile as wide as the vocabulary would be 250 MiB."""
    plan = plan_linear_logprobs(4096, 32000, 2048, **H200, batch_invariant=True, max_extra_bytes=200 << 20)
    assert plan.extra_bytes <= 200 << 20
    hidden, weight, targets = torch.randn(300, 64), torch.randn(2000, 64), torch.arange(300)
    needed = {"dtype": torch.float32, "device": "cpu", "batch_invariant": True}
    least = plan_linear_logprobs(300, 2000, 64, **needed).least_bytes
    found = [
        linear_logprobs(hidden.requires_grad_(), weight, targets, batch_invariant=True, max_extra_bytes=budget).logps
        for budget in (None, least, 2 * least)
    ]
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_what_is_not_asked_for_costs_nothing():
    frozen = plan_linear_logprobs(8192, 128256, 4096, needs=(True, False))
    assert frozen.backward.flops == 2 * frozen.forward.flops
    assert plan_linear_logprobs(8192, 128256, 4096, needs=(False, False)).backward is None


def test_tiles_are_those_of_the_run():
    """On CPU, where every product passes the dispatcher."""
    from torch.utils._python_dispatch import TorchDispatchMode

    widths = set()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name == "aten::mm":
                widths.add((args[0].shape[0], args[1].shape[1]))
            return func(*args, **(kwargs or {}))

    plan = plan_linear_logprobs(TOKENS, 40000, 64, dtype=torch.float32, device="cpu", needs=(False, False))
    with Products():
        linear_logprobs(torch.randn(TOKENS, 64), torch.randn(40000, 64), torch.zeros(TOKENS, dtype=torch.long))
    assert max(widths) == plan.forward.tiles
    assert plan.forward.tiles.vocab % BLOCK_VOCAB == 0


@pytest.mark.parametrize("rows", [0, 7, 256, 1100])
def test_column_sums(rows, device):
    matrix = torch.randn(rows, 30, device=device).to(torch.bfloat16)[:, 3:]
    torch.testing.assert_close(gemm.column_sums(matrix), matrix.double().sum(0).float(), rtol=1e-5, atol=1e-5)


@NEEDS_GPU
def test_column_sums_take_little_memory():
    matrix = torch.ones(4096, 20480, device="cuda", dtype=torch.bfloat16)
    with tensor_peak(matrix.device) as peak:
        sums = gemm.column_sums(matrix)
    assert torch.equal(sums, torch.full_like(sums, 4096.0))
    assert peak.bytes < matrix.nbytes / 25
