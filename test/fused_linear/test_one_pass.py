"""One pass against two: the same loss, metrics and gradients; what it may hold, and when it is chosen.

Losses and options in all their combinations, in one pass and in two, are the fuzzer's.
"""

import math

import pytest
import torch
from torch import nn

from head_calls import Products
from host_reads import host_reads
from liger_rl import FusedLinearGRPOLoss, linear_logprobs
from liger_rl.head import plan_linear_logprobs
from liger_rl.losses import OffPolicySequenceMask, Segments, TokenLoss, TokenMean, TopEntropyMask
from loss_calls import HIDDEN, VOCAB, Batch, Step, assert_same, batch, loss_of, step, taken
from oracles import relative_error

F32, BF16 = torch.float32, torch.bfloat16
EVERY_TOKEN = {"metrics": "basic"}  # reads all log-probabilities, those of tokens without an advantage too


def one(loss_type="grpo", **options) -> FusedLinearGRPOLoss:
    return FusedLinearGRPOLoss(loss_type, passes="one", **options)


def both(loss_type, options, data, *, chunk_tokens=None, **more) -> tuple[Step, Step]:
    two = FusedLinearGRPOLoss(loss_type, passes="two", **options)
    return step(one(loss_type, chunk_tokens=chunk_tokens, **options), data, **more), step(two, data, **more)


CHUNKS = {"token": (4, 1000), "sequence": (None, 20), "batch": (None,)}
LOSSES = [  # what a token's gradient depends on, preset, options
    ("token", "grpo", {}),
    ("token", "dapo", {"entropy_coef": 0.02, "epsilon_high": 0.28, "metrics": "with_entropy"}),
    ("token", "dr_grpo", {"max_completion_length": 11, "beta": 0.1, "entropy_coef": -0.1, "scale": 0.5}),
    ("sequence", "gspo", {"epsilon_low": 0.03, "epsilon_high": 0.04, "metrics": "basic"}),
    ("sequence", "gmpo", {"entropy_coef": 0.02}),
    ("sequence", "grpo", {"corrections": (OffPolicySequenceMask(threshold=0.05),)}),
    ("batch", "grpo", {"corrections": (TopEntropyMask(top_entropy_quantile=0.3),), "entropy_coef": 0.1}),
]


# --- the same as two passes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depends_on", "preset", "options", "chunk_tokens"),
    [(*loss, chunk_tokens) for loss in LOSSES for chunk_tokens in CHUNKS[loss[0]]],
)
def test_losses_in_chunks(depends_on, preset, options, chunk_tokens, device):
    """Any chunks, or such as hold whole sequences, or one."""
    data = batch(device=device, vocab=VOCAB if chunk_tokens is None else 300)  # which are two tiles
    found, expected = both(preset, options, data, chunk_tokens=chunk_tokens)
    went = taken(one(preset, chunk_tokens=chunk_tokens, **options), data)
    if depends_on == "token":
        projected = data.columns["mask"]
        if not {"beta", "entropy_coef"} & options.keys():
            projected = projected & (data.columns["advantages"] != 0)[:, None]
        n = int(projected.sum())
        assert went == (n, 1 if chunk_tokens is None else math.ceil(n / min(chunk_tokens, n)))
    else:
        assert went.chunks > 1 if chunk_tokens is not None else went.chunks == 1
    assert_same(found, expected)


@pytest.mark.parametrize("seed", range(2))
def test_sequences_are_kept_whole_in_as_few_chunks_as_planned(seed):
    """Chunks of any lengths, none longer than was asked for; a sum in bfloat16 is rounded four times at most."""
    torch.manual_seed(seed)
    data = batch(12, 60, BF16, vocab=65, hidden_size=8, idle=False)
    mask = torch.arange(60) < torch.randint(0, 60, (12, 1))
    data, n = data.changed(mask=mask), int(mask.sum())
    expected = step(FusedLinearGRPOLoss("gspo", passes="two"), data)
    for chunk_tokens in (60, 100, 150, 400):
        module = one("gspo", chunk_tokens=chunk_tokens)
        with Products() as products:
            found = loss_of(module, data.head.leaves(), data)
        sizes = [tokens for tokens, _ in products.logits(8)]
        # The gradient of a sequence that was parted would be that of other ratios.
        assert sum(sizes) == n
        assert max(sizes) <= chunk_tokens
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-7)
        for name, mine in step(module, data).grads.items():
            assert relative_error(mine, expected.grads[name]) < 4e-3
        options = {
            "chunk_tokens": chunk_tokens,
            "device": "cpu",
            "dtype": BF16,
            "passes": "one",
            "tokens_per_gradient": 60,
        }
        if "summed in bfloat16" in plan_linear_logprobs(n, 65, 8, **options).reason:
            assert len(sizes) <= 4


class WeighedBySequence:
    """A token's gradient depends on that token alone, and on which sequence it is of."""

    token_local = True

    def __call__(self, logps, batch):
        return TokenLoss(-batch.advantages * logps * (1.0 + batch.segments.index.to(logps.dtype)))


def test_the_sequences_that_a_packed_batch_names_reach_every_chunk(device):
    data = batch(device=device)
    rows, length = data.head.targets.shape
    head = data.head._replace(hidden=data.head.hidden.flatten(0, 1), targets=data.head.targets.flatten())
    columns = {name: c.view(rows, -1).expand(rows, length).flatten() for name, c in data.columns.items()}
    packed = Batch(head, columns | {"mask": torch.ones_like(columns["mask"])})
    segments = Segments(index=torch.arange(rows, device=device).repeat_interleave(length), count=rows)
    options, objective = {"reduction": TokenMean()}, WeighedBySequence()
    assert_same(*both(objective, options, packed, chunk_tokens=7, segments=segments))
    assert taken(one(objective, chunk_tokens=7, **options), packed, segments=segments).chunks > 1


def test_a_nan_reaches_the_gradients(device):
    data = batch(device=device)
    data.head.hidden[1, 0] = math.nan
    found, expected = both("gpg", {}, data)
    for name, mine in found.grads.items():
        assert mine.isnan().any()
        assert torch.equal(mine.isnan(), expected.grads[name].isnan())


# --- autograd ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [65536.0, 0.25, 1 / 3, 0.0])
def test_the_loss_may_be_scaled(factor, device):
    """By GradScaler, by the number of micro-batches, by hand, by a gradient: the gradients of two passes.

    In bfloat16 a power of two changes no digit, any other factor costs one more rounding.
    """
    data = batch(device=device)
    found, expected = both("dapo", {"beta": 0.1}, data, factor=factor)
    assert_same(found, expected)
    leaves = data.head.leaves()
    loss_of(one("dapo", beta=0.1), leaves, data).loss.backward(gradient=torch.tensor(factor, device=device))
    for name, grad in leaves.grads().items():
        assert relative_error(grad, expected.grads[name]) < 1e-6
    data, module = batch(16, 24, BF16, device, vocab=517, hidden_size=64), one("dapo", beta=0.1)
    found, plain = step(module, data, factor=factor).grads, step(module, data).grads
    for name in ("hidden", "weight"):
        exact = factor * plain[name].double()
        assert torch.equal(found[name].double(), exact) == (factor != 1 / 3)
        assert relative_error(found[name], exact) <= BF16.itemsize * 2.0**-10


def test_second_backward_gives_the_same_gradients(device):
    data = batch(16, 24, BF16, device, vocab=517, hidden_size=64)
    factor = 0.3  # which is no bfloat16 number
    head = data.head.leaves()
    leaves, loss = list(head.floats().values()), loss_of(one(), head, data).loss
    first = torch.autograd.grad(factor * loss, leaves, retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    for gradient in first:
        gradient.zero_()  # whoever got them may write to them
    for mine, other in zip(torch.autograd.grad(factor * loss, leaves), kept, strict=True):
        assert torch.equal(mine, other)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


def test_saved_tensors_are_never_written_to(device):
    """Hooks are given tensors, clone or move them, and give back their own; none of these may change."""
    data, seen = batch(device=device), []
    expected = step(one(), data, factor=3.0).grads

    def see(tensor):
        seen.append((tensor, tensor.clone()))
        return tensor

    for hooks in (torch.autograd.graph.saved_tensors_hooks(see, see), torch.autograd.graph.save_on_cpu()):
        leaves = data.head.leaves()
        with hooks:
            loss = loss_of(one(), leaves, data).loss
            (3 * loss).backward()
        for name, other in expected.items():
            assert relative_error(leaves.grads()[name], other) < 1e-6
    assert all(torch.equal(tensor, before) for tensor, before in seen)


def test_a_backward_gives_its_gradients_away():
    """What the forward made is the weight's `grad`, scaled where it lies: the backward makes none."""
    data = batch()
    leaves = data.head.leaves()
    loss = loss_of(one(), leaves, data).loss
    with Products() as backward:
        (3 * loss).backward()
    assert leaves.weight.grad.any()
    assert (VOCAB, HIDDEN) not in {shape for shape, _ in backward.made}


# --- what costs nothing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [(), ("hidden",), ("hidden", "weight")])
def test_tokens_that_are_cut_cost_no_second_product(frozen):
    data = batch()
    head, mask, advantages = data.head, data.columns["mask"], data.columns["advantages"][:, None]
    with Products() as products:
        step(one(chunk_tokens=20, **EVERY_TOKEN), data, frozen=frozen)
    logps = linear_logprobs(head.hidden, head.weight, head.targets, bias=head.bias, mask=mask).logps
    ratio = (logps - data.columns["old_per_token_logps"]).exp()
    cut = ((ratio < 0.8) & (advantages < 0)) | ((ratio > 1.2) & (advantages > 0)) | (advantages == 0)
    assert products.flops == 2 * HIDDEN * VOCAB * int(mask.sum() + (2 - len(frozen)) * (mask & ~cut).sum())


@pytest.mark.parametrize(("advantages", "picks"), [("all", 0), ("some", 3)])
def test_rows_are_picked_once_a_chunk_and_only_where_that_pays(advantages, picks):
    """Each pick waits for the device; so does the count of the tokens."""
    data = batch(6, 9)
    data.columns["mask"][:] = True
    if advantages == "all":
        data.columns["advantages"][:] = torch.rand(6) + 0.1
    with host_reads(torch.device("cpu")) as reads:
        step(one(chunk_tokens=18, **EVERY_TOKEN), data)
    assert len(reads.names) == 1 + picks, reads.names


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("chunk_tokens", [8, 40], ids=["float32 sum", "rounded sum"])
def test_no_tensor_larger_than_what_a_chunk_keeps(dtype, chunk_tokens):
    """One gradient of the weight, one float32 sum where the plan says so, no tile beyond chunk_tokens x V."""
    data = batch(8, 8, dtype, vocab=1000, hidden_size=4)
    data.columns["mask"][:] = True
    with Products() as products:
        step(one(beta=0.1, chunk_tokens=chunk_tokens), data)
    kept = chunk_tokens * 1000 * dtype.itemsize
    large = [(shape, kind) for shape, kind in products.made if math.prod(shape) * kind.itemsize >= 8000]
    summed = F32 if chunk_tokens == 8 else dtype
    assert {kind for shape, kind in large if shape == (1000, 4)} == {dtype, summed}
    assert all(math.prod(shape) * kind.itemsize <= max(kept, 4 * chunk_tokens * 256) for shape, kind in large)


# --- when it is taken -------------------------------------------------------------------------------------------------


def own(logps, batch):
    return TokenLoss(-batch.advantages * logps)


class Scaled(nn.Module):
    token_local = True

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, logps, batch):
        return TokenLoss(-self.factor * batch.advantages * logps)


@pytest.mark.parametrize(
    ("message", "loss_type", "options", "call"),
    [
        ("chunk_vocab = None, got 64", "grpo", {"chunk_vocab": 64}, {}),
        (r"a softcap of at least the temperature, 2\.0, got 1", "grpo", {"softcap": 1, "temperature": 2.0}, {}),
        ("a token_local or sequence_local attribute .* own depends on", own, {"reduction": TokenMean()}, {}),
        ("no parameters .* in Scaled", Scaled(), {"reduction": TokenMean()}, {}),
        ("room in one chunk for 9 tokens that the gradient of one .* it holds 8,", "gspo", {"chunk_tokens": 8}, {}),
    ],
)
def test_what_one_pass_needs_is_named(message, loss_type, options, call):
    data = batch()
    data.columns["mask"][:] = True
    with Products() as products, pytest.raises(ValueError, match=f'passes="one" needs {message}'):
        step(one(loss_type, **options), data, **call)
    assert products.flops == 0
    by_itself = FusedLinearGRPOLoss(loss_type, **options)
    assert taken(by_itself, data, **call).chunks == 0
    step(by_itself, data, **call)


def test_an_objective_that_says_no_more_than_that_sequences_are_apart():
    def of_sequence(logps, batch):
        mean = batch.sequence_mean(torch.where(batch.mask, logps, 0.0))
        return TokenLoss((-batch.advantages * mean.square()).expand_as(logps))

    of_sequence.sequence_local = True
    found, expected = both(of_sequence, {"reduction": TokenMean()}, batch(), chunk_tokens=20)
    torch.testing.assert_close(found.loss, expected.loss)
    for name, mine in found.grads.items():
        torch.testing.assert_close(mine, expected.grads[name], rtol=1e-4, atol=1e-6)


def test_split_sequences_take_two_passes():
    data = batch(1, 9)
    columns = {name: c[0] if c.dim() == 2 else c.expand(9) for name, c in data.columns.items()}
    packed = Batch(data.head._replace(hidden=data.head.hidden[0], targets=data.head.targets[0]), columns)
    split = Segments(index=torch.zeros(9, dtype=torch.long), count=1, all_reduce=lambda sums: sums)
    with pytest.raises(ValueError, match="whole sequences on each rank"):
        step(one("gspo"), packed, segments=split)
    assert taken(FusedLinearGRPOLoss("gspo"), packed, segments=split).chunks == 0


@pytest.mark.parametrize("narrow", [("hidden", "weight", "bias"), ("hidden", "bias"), ("weight", "bias")], ids=str)
def test_float16_takes_two_passes(narrow):
    """Autocast makes the products' dtype, not that of the gradients, which are rounded before the loss is scaled."""
    data = batch()
    data = data._replace(head=data.head._replace(**{name: getattr(data.head, name).half() for name in narrow}))
    auto, every = FusedLinearGRPOLoss("grpo"), len(narrow) == 3
    with torch.autocast("cpu", BF16, enabled=not every):
        with pytest.raises(ValueError, match="bfloat16 or float32 products" if every else "products and gradients"):
            step(one(), data)
        assert taken(auto, data).chunks == 0
        assert every or taken(auto, data, frozen=narrow).chunks == 1


def test_what_auto_takes():
    data = batch()
    for options, chunks in (({}, 1), ({"chunk_tokens": 8}, 0), ({"chunk_vocab": 8}, 0), ({"passes": "two"}, 0)):
        assert taken(FusedLinearGRPOLoss("grpo", **options), data).chunks == chunks
