"""Every property of a call, asked of every public call: `head_calls.CALLS` is the table.

Values and gradients against float64, in all combinations of options, are the fuzzer's and the files' of each call.
"""

import math
from collections.abc import Collection
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from devices import skip_without_interpreter
from head_calls import CALLS, Batch, Products, assert_close, assert_same, batch, functional, run_triton
from host_reads import host_reads
from liger_rl import linear_logprobs

VOCAB, HIDDEN = 129, 16
LOSSES = {name for name in CALLS if "loss" in name or "one pass" in name}  # their results are scalars
GIVEN_LOGITS = {name for name in CALLS if "given logits" in name}  # no head
WITH_TEACHER = {"forward KL", "reverse KL", "JSD", "JSD in one pass"}
SUPPORTS = {"support", "support with empty rows"}


def calls(*takes: str, without: Collection[str] = (), each: Collection[dict] = ()) -> pytest.MarkDecorator:
    """The calls that take all of these options, `each` of these sets of options a case where a call takes them."""
    names = [n for n, call in CALLS.items() if call.takes.issuperset(takes) and n not in without]
    if not each:
        return pytest.mark.parametrize("name", names)
    cases = [(n, options) for options in each for n in names if CALLS[n].takes.issuperset(options)]
    return pytest.mark.parametrize(("name", "options"), cases, ids=["-".join([n, *o]) for n, o in cases])


def large(device: torch.device) -> Batch:
    """Enough tokens for the kernels of a GPU with an epilogue."""
    if device.type == "cpu":
        return batch()
    return batch((4, 256), 64, 1000, torch.bfloat16, device)


# --- which tokens count -----------------------------------------------------------------------------------------------


@calls()
@pytest.mark.parametrize(("garbage", "wrong"), [(math.nan, 10**9), (-math.inf, VOCAB), (1e38, -1)])
def test_nothing_under_the_mask_matters(name, garbage, wrong, device):
    """Neither hidden states nor ids, and the gradient of `a` sees neither."""
    call, clean = CALLS[name], batch(device=device)
    expected, masked = call.solve(clean), ~clean.mask
    assert all(part.isfinite().all() for part in (*expected[0], *expected[1].values()))
    for part in expected[0][: 0 if name in LOSSES else None]:
        assert not part[masked].any()
    assert not expected[1][call.inputs[0]][masked].any()
    dirty = clean._replace(
        hidden=clean.hidden.masked_fill(masked[..., None], garbage),
        logits=clean.logits.masked_fill(masked[..., None], garbage),
        teacher_hidden=clean.teacher_hidden.masked_fill(masked[..., None], garbage),
        advantages=clean.advantages.masked_fill(masked, garbage) if name not in WITH_TEACHER else clean.advantages,
        targets=clean.targets.masked_fill(masked, wrong),
    )
    assert_same(call.solve(dirty), expected)


@calls()
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_dtypes_of_mask_and_targets_agree(name, dtype, device):
    x, call = batch(device=device), CALLS[name]
    expected = call.solve(x)
    assert_same(call.solve(x._replace(mask=x.mask.to(dtype))), expected)
    if not dtype.is_floating_point:
        smaller = {torch.int64: torch.int32, torch.uint8: torch.uint8}[dtype]
        ids = x.ids if "support" in name else x.ids.to(smaller)
        assert_same(call.solve(x._replace(targets=x.targets.to(smaller), ids=ids)), expected)


@calls(without={"several targets", "a teacher's lists", "JSD in one pass"} | WITH_TEACHER)
def test_a_negative_target_masks_its_token(name, device):
    x = batch(device=device)
    ignored = x._replace(targets=x.targets.masked_fill(~x.mask, -100), mask=torch.ones_like(x.mask))
    if "loss" in name:  # the reduction counts the mask's tokens
        ignored = ignored._replace(mask=x.mask)
    assert_same(CALLS[name].solve(ignored), CALLS[name].solve(x))


@calls()
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (3, 5)])
def test_no_token_that_counts(name, shape, device):
    x = batch(device=device)
    x = x.tokens((slice(shape[0]), slice(shape[1])))
    values, grads = CALLS[name].solve(x._replace(mask=torch.zeros(shape, device=device)))
    for part in values:
        assert name in LOSSES or part.shape[:2] == shape
        assert not part.any()
    for input_name, grad in grads.items():
        assert grad.shape == getattr(x, input_name).shape
        assert not grad.any()  # any() is true for NaN


@calls()
def test_another_order_of_the_tokens(name, device):
    """Values follow their tokens; gradients of parameters are the same sums, up to their order."""
    x, call = batch(device=device), CALLS[name]
    order = torch.tensor([2, 0, 1], device=device)
    leaves, moved = x.leaves(call.inputs), x.tokens(order).leaves(call.inputs)
    values, others = call.function(leaves), call.function(moved)
    for mine, truth in zip(others, values, strict=True):
        torch.testing.assert_close(mine, truth if name in LOSSES else truth[order], rtol=1e-6, atol=1e-6)
    (sum(part.sum() for part in values)).backward()
    (sum(part.sum() for part in others)).backward()
    for part in call.inputs:
        mine, truth = getattr(moved, part).grad, getattr(leaves, part).grad
        truth = truth[order] if part in ("hidden", "logits") else truth
        torch.testing.assert_close(mine, truth, rtol=1e-4, atol=1e-5)


# --- memory, chunks, dtypes -------------------------------------------------------------------------------------------


@calls()
def test_strided_inputs_and_inputs_left_alone(name, device):
    """Transposed, sliced and strided views give what their contiguous copies give; nothing is written to them."""

    def strided(x: Tensor) -> Tensor:
        return torch.stack([x.mT.contiguous(), torch.full_like(x.mT, math.nan)], -1)[..., 0].mT

    x, call = batch(device=device), CALLS[name]
    views = x._replace(
        hidden=x.hidden.transpose(0, 1).contiguous().transpose(0, 1), weight=strided(x.weight),
        bias=torch.stack([x.bias, x.bias * 0], -1)[:, 0],
        teacher_hidden=strided(x.teacher_hidden), teacher_weight=strided(x.teacher_weight), logits=strided(x.logits),
        targets=torch.cat([x.targets, x.targets], 1)[:, :5], mask=x.mask.T.contiguous().T,
        advantages=strided(x.advantages),
    )  # fmt: skip
    assert not any(getattr(views, part).is_contiguous() for part in ("hidden", "weight", "bias", "targets", "mask"))
    before = [part.clone() for part in views]
    assert_close(call.solve(views), call.solve(x))
    assert all(torch.equal(part, copy) for part, copy in zip(views, before, strict=True))


@calls("chunks")
@pytest.mark.parametrize("chunks", [(1, 129), (4, 50), (7, 1), (1000, 128)], ids=str)
def test_any_chunk_gives_the_same(name, chunks, device):
    x, call = batch(device=device), CALLS[name]
    assert_close(call.solve(x, chunk_tokens=chunks[0], chunk_vocab=chunks[1]), call.solve(x))


@calls("chunks", without=WITH_TEACHER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_tensor_larger_than_a_tile(name, dtype):
    """The weight's gradient, and that of b, are the exceptions. They are never held in a wider dtype."""
    tokens, width, vocab = 64, 4, 1000
    x = batch((4, 16), width, vocab, dtype)
    with Products() as products:
        CALLS[name].solve(x, chunk_tokens=16, chunk_vocab=50)
    allowed = max(16 * 50, tokens * 3 * width, vocab, tokens * 4 * 4)
    sizes = {(shape, kind) for shape, kind in products.made if math.prod(shape) > allowed}
    assert sizes == {((vocab, width), dtype)}


@calls("autocast")
def test_autocast_multiplies_rounded_numbers(name, device):
    """Values are those of rounded inputs; gradients have the dtypes of the parameters."""
    x, call = batch(device=device), CALLS[name]
    rounded = x._replace(**{
        part: getattr(x, part).bfloat16().float() for part in ("hidden", "weight", "teacher_hidden", "teacher_weight")
    })  # fmt: skip
    with torch.autocast(device.type, torch.bfloat16):
        values, grads = call.solve(x)
        mixed = call.solve(x._replace(hidden=x.hidden.bfloat16()))
    expected = call.solve(rounded)
    for mine, half, truth in zip(values, mixed[0], expected[0], strict=True):
        assert mine.dtype == half.dtype == torch.float32
        torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(half, truth, rtol=1e-5, atol=1e-5)
    assert {grad.dtype for grad in grads.values()} == {torch.float32}
    assert [mixed[1][part].dtype for part in ("hidden", "weight")] == [torch.bfloat16, torch.float32]
    assert not torch.equal(values[0], call.solve(x)[0][0])


@calls()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_default_dtype_changes_nothing(name, dtype):
    x = batch()
    leaves, others = (x.leaves(CALLS[name].inputs) for _ in range(2))
    expected = CALLS[name].function(leaves)
    sum(part.sum() for part in expected).backward()
    torch.set_default_dtype(dtype)  # a fixture sets it back
    found = CALLS[name].function(others)
    sum(part.sum() for part in found).backward()
    grads = ({part: getattr(inputs, part).grad for part in CALLS[name].inputs} for inputs in (others, leaves))
    assert_close((found, next(grads)), (expected, next(grads)), 1e-6)


# --- what costs nothing -----------------------------------------------------------------------------------------------


def flops(name: str, x: Batch, *, live: int | None = None, frozen=()) -> tuple[int, int]:
    """Of a forward, and of a backward in which `live` of the tokens have a gradient."""
    leaves = x.leaves(tuple(part for part in CALLS[name].inputs if part not in frozen))
    with Products() as forward:
        values = CALLS[name].function(leaves)
    factor = torch.ones(x.mask.numel()) if live is None else torch.arange(x.mask.numel()) < live
    loss = sum((part.flatten(2).sum(-1) * factor.view(x.mask.shape)).sum() for part in map(unsqueezed, values))
    with Products() as backward:
        loss.backward()
    assert not any(part.isnan().any() for pair in forward.factors + backward.factors for part in pair)
    return forward.flops, backward.flops


def unsqueezed(values: Tensor) -> Tensor:
    return values[..., None] if values.dim() else values.expand(1, 1, 1)


@calls(without=GIVEN_LOGITS)
def test_masked_tokens_enter_no_product(name):
    x = batch((4, 10))
    whole = x._replace(mask=torch.ones_like(x.mask))
    poisoned = x._replace(**{
        part: getattr(x, part).masked_fill(~x.mask[..., None], math.nan) for part in ("hidden", "teacher_hidden")
    })  # fmt: skip
    if name == "support with empty rows":  # tokens in places that are even have products
        count, total = int(x.mask[:, ::2].sum()), x.mask[:, ::2].numel()
    else:
        count, total = int(x.mask.sum()), x.mask.numel()
    for mine, all_of_them in zip(flops(name, poisoned), flops(name, whole), strict=True):
        assert mine * total == all_of_them * count


@calls(without=LOSSES | SUPPORTS | GIVEN_LOGITS)
def test_tokens_without_a_gradient_enter_no_product(name):
    x = batch((4, 10))
    x = x._replace(mask=torch.ones_like(x.mask))
    whole = flops(name, x)
    assert flops(name, x, live=13)[1] * 40 == whole[1] * 13
    assert flops(name, x, live=0)[1] == 0


@calls(without=LOSSES | GIVEN_LOGITS)
def test_a_token_without_a_gradient_may_hold_anything(name, device):
    call, grads = CALLS[name], []
    for garbage in (0.0, math.nan):
        x = batch(device=device)
        x = x._replace(hidden=x.hidden.clone(), mask=torch.ones_like(x.mask))
        x.hidden[0, 0] = garbage
        leaves = x.leaves(call.inputs)
        sum(part.flatten(0, 1)[5:].sum() for part in call.function(leaves)).backward()
        grads.append(leaves.weight.grad)
    assert grads[0].isfinite().all()
    assert torch.equal(*grads)


@calls(without=LOSSES)
def test_a_gradient_of_nan_is_not_dropped(name, device):
    """A diverging loss must show in the gradients."""
    x = batch(device=device)
    leaves = x.leaves(CALLS[name].inputs)
    values = CALLS[name].function(leaves)[0]
    factor = torch.zeros_like(values)
    factor[0, 0], factor[1, 0] = 1.0, math.nan
    values.backward(factor)
    grad = getattr(leaves, CALLS[name].inputs[0]).grad
    assert grad[1, 0].isnan().all()
    assert grad[0, 0].isfinite().all()
    assert name in GIVEN_LOGITS or leaves.weight.grad.isnan().any()


@calls(without=GIVEN_LOGITS)
@pytest.mark.parametrize("frozen", [("hidden",), ("weight",), ("bias",), ("hidden", "bias"), ("hidden", "weight")])
def test_frozen_inputs_get_none_and_cost_no_product(name, frozen):
    x, call = batch((2, 6)), CALLS[name]
    frozen = tuple(part for part in frozen if part in call.inputs)
    whole, found = call.solve(x), call.solve(x, frozen=frozen)
    for part, grad in whole[1].items():
        assert (found[1][part] is None) == (part in frozen)
        if part not in frozen:
            torch.testing.assert_close(found[1][part], grad, rtol=1e-6, atol=1e-6)
    for mine, truth in zip(found[0], whole[0], strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-6, atol=1e-6)
    if name not in SUPPORTS:
        saved = sum(2 * int(x.mask.sum()) * VOCAB * HIDDEN for part in frozen if part != "bias")
        assert sum(flops(name, x)) - sum(flops(name, x, frozen=frozen)) == saved


@calls()
def test_no_gradient_asked_for_runs_the_forward_alone(name):
    x, call = batch(), CALLS[name]
    leaves = x.leaves(call.inputs)
    with Products() as products:
        expected = call.function(x.leaves(()))
    assert not any(part.requires_grad for part in expected)
    for context in (torch.no_grad, torch.inference_mode):
        with context(), Products() as again:
            found = call.function(leaves)
        assert again.flops == products.flops
        for mine, truth in zip(found, expected, strict=True):
            assert not mine.requires_grad
            torch.testing.assert_close(mine, truth, rtol=1e-6, atol=1e-6)


# --- autograd ---------------------------------------------------------------------------------------------------------


@calls()
def test_the_same_bits_twice_and_in_a_second_backward(name, device):
    x, call = large(device), CALLS[name]
    leaves = x.leaves(call.inputs)
    inputs = [getattr(leaves, part) for part in call.inputs]
    values = call.function(leaves)
    loss = functional(*values)
    first, again = (torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, again))
    repeated = call.solve(x)
    assert_same(([part.detach() for part in values], dict(zip(call.inputs, first, strict=True))), repeated)


@calls()
def test_a_write_before_the_backward_changes_no_gradient(name):
    """A write to an input that the backward reads raises PyTorch's error; results may be written to."""
    call, expected = CALLS[name], CALLS[name].solve(batch())[1]
    for written in ("results", *Batch._fields):
        leaves = batch().leaves(call.inputs)
        values = call.function(leaves)
        loss = functional(*values)
        with torch.no_grad():
            for part in values if written == "results" else [getattr(leaves, written)]:
                part.fill_(1)
        try:
            loss.backward()
        except RuntimeError as error:
            if written == "results" or "modified by an inplace operation" not in str(error):
                raise
        else:
            assert all(torch.equal(getattr(leaves, part).grad, grad) for part, grad in expected.items()), written


@pytest.mark.parametrize(
    ("name", "through"),
    [(name, through) for name in CALLS for through in ("", "a checkpoint")]
    + [("dense", through) for through in ("a frozen head", "torch.compile")]
    + [(name, "one kernel") for name in ("policy of given logits", "loss")],
)
def test_a_second_derivative_raises(name, through, device, monkeypatch):
    """Whoever asks for one is told, also if the gradient from above has no graph."""
    call, x = CALLS[name], batch(device=device)
    frozen = ("weight",) if through == "a frozen head" else ()
    if through == "one kernel":
        skip_without_interpreter(device)
        run_triton(monkeypatch)
    leaves = x.leaves(tuple(part for part in call.inputs if part not in frozen))
    tensor = getattr(leaves, call.inputs[0])
    torch._dynamo.reset()

    def value(x: Batch) -> Tensor:
        return functional(*call.function(x))

    def traced(x: Batch) -> Tensor:
        if through == "a checkpoint":
            return checkpoint(value, x, use_reentrant=False)
        if through == "torch.compile":
            return functional(*torch.compile(call.function, backend="eager")(x))
        return value(x)

    for factor in (1.0, torch.ones((), device=device, requires_grad=True)):
        with pytest.raises(RuntimeError, match="create_graph must be False, got True"):
            torch.autograd.grad(traced(leaves) * factor, tensor, create_graph=True)


@calls()
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_forward_mode_derivative_raises(name, frozen, device):
    call = CALLS[name]
    x = batch(device=device).leaves(() if frozen else call.inputs)
    with forward_ad.dual_level():
        call.function(x)  # a level without tangents of ours is no mistake
        tensor = getattr(x, call.inputs[0])
        dual = x._replace(**{call.inputs[0]: forward_ad.make_dual(tensor, torch.ones_like(tensor))})
        with pytest.raises(NotImplementedError, match="tangent"):
            call.function(dual)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_forward_mode_derivative_of_torch_func_raises(frozen, device):
    x = batch(device=device).leaves(() if frozen else ("hidden", "weight"))

    def head(hidden: Tensor) -> Tensor:
        return linear_logprobs(hidden, x.weight, x.targets).logps.sum()

    with pytest.raises(NotImplementedError, match="must have no tangent"):
        torch.func.jvp(head, (x.hidden,), (torch.ones_like(x.hidden),))


def test_other_derivatives_of_torch_func_raise(device):
    x = batch(device=device)

    def head(hidden: Tensor, targets: Tensor) -> Tensor:
        return linear_logprobs(hidden, x.weight, targets).logps.sum()

    with pytest.raises(NotImplementedError, match="hidden must be a plain tensor, got one of torch"):
        torch.func.grad(head)(x.hidden, x.targets)
    rows = x.hidden.flatten(0, -2)[:, None], x.targets.flatten()[:, None]
    with pytest.raises(NotImplementedError, match="hidden must be a plain tensor, got one of torch"):
        torch.func.vmap(head)(*rows)
    with pytest.raises(NotImplementedError, match="targets must be a plain tensor, got one of torch"):
        torch.func.vmap(head, (None, 0))(rows[0][0], rows[1])


# --- options ----------------------------------------------------------------------------------------------------------


# Reads of a support's values are Triton's kernels' to spare: test_support.py.
@calls(without=SUPPORTS)
def test_one_host_read_in_each_direction(name, device):
    call, leaves = CALLS[name], batch(device=device).leaves(CALLS[name].inputs)
    functional(*call.function(leaves)).backward()
    with host_reads(device) as forward:
        values = call.function(leaves)
    total = functional(*values)
    with host_reads(device) as backward:
        total.backward()
    # Lists of places are sums in PyTorch's own kernels on CPU.
    counts = [len([read for read in reads.names if read != "nonzero"]) for reads in (forward, backward)]
    assert counts[0] <= 1, forward.names
    assert counts[1] <= 1, backward.names
    assert forward.names, "the count would miss a read"


class Sharded:
    """Parameters whose data is a shard of no size, but inside `gather`; counts how often it is entered."""

    def __init__(self, *parameters: Tensor) -> None:
        self.whole = {id(p): p.data for p in parameters}
        self.entered: list[int] = []
        for p in parameters:
            p.data = p.data.new_empty(0)

    @contextmanager
    def gather(self, *parameters: Tensor):
        self.entered.append(len(parameters))
        for p in parameters:
            p.data = self.whole.get(id(p), p.data)
        yield
        for p in parameters:
            p.data = p.data.new_empty(0)


@calls("gather")
@pytest.mark.parametrize("masked", [False, True], ids=["live", "all masked"])
def test_gather_is_entered_once_in_each_direction(name, masked, device):
    """By every rank, whatever it holds: gathering is a collective. Each head has its own."""
    call, x = CALLS[name], batch(device=device)
    x = x._replace(mask=torch.zeros_like(x.mask)) if masked else x
    leaves = x.leaves(call.inputs)
    heads = [(leaves.weight, leaves.bias), (leaves.teacher_weight,)][: 1 + (name in WITH_TEACHER)]
    head = Sharded(*(part for parts in heads for part in parts))
    values = call.function(leaves, gather=head.gather)
    assert leaves.weight.shape == (0,)
    assert head.entered == [len(parts) for parts in heads]
    # Not .backward(): to accumulate a whole gradient next to a shard is up to the framework that shards.
    grads = torch.autograd.grad(functional(*values), [getattr(leaves, part) for part in call.inputs])
    backward = [] if "one pass" in name else [len(parts) for parts in heads]
    assert head.entered[len(heads) :] == backward
    assert_same(([part.detach() for part in values], dict(zip(call.inputs, grads, strict=True))), call.solve(x))
