"""A loss that makes its gradients of blocks in the forward gives what one does that makes them in the backward.

It runs whole where there is no GPU, too, in Triton's interpreter.
"""

import pytest
import torch

from head_calls import run_triton
from liger_rl import FusedLinearGRPOLoss, LowRank, TopEntropyMask, blocks_loss, grpo
from liger_rl.head.engines import block_sparse, choose
from liger_rl.head.engines.choose import HeadShape
from liger_rl.policy import fused

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter misreads bfloat16 descriptors
ROWS, COLUMNS, VOCAB = (8, 120, 3000) if DEVICE.type == "cuda" else (4, 90, 1500)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """On CPU, 16-bit calls run as on a GPU."""
    if DEVICE.type == "cpu":
        run_triton(monkeypatch, epilogue=True)
        monkeypatch.setattr(fused, "DEVICES", ("cpu",))
        monkeypatch.setattr(blocks_loss, "NARROW", ())
        monkeypatch.setattr(HeadShape, "cuda", True)
        monkeypatch.setattr(choose, "gpu_of", lambda device: None)
        monkeypatch.setattr(choose, "gpu_lacks", lambda gpu: None)


@pytest.fixture
def choices(monkeypatch):
    """Grows by whether autograd was at work, with each choice of blocks."""
    found, choose = [], block_sparse.choose_blocks

    def recorded(*args, **kwargs):
        found.append("backward" if torch._C._current_graph_task_id() != -1 else "forward")
        return choose(*args, **kwargs)

    monkeypatch.setattr(block_sparse, "choose_blocks", recorded)
    return found


class Batch:
    def __init__(self, **columns):
        g = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(*shape, generator=g)

        weight, ids = normal(VOCAB, 64) / 8, (torch.rand(ROWS, COLUMNS, generator=g) ** 4 * VOCAB).long()
        hidden = normal(ROWS, COLUMNS, 64) + 30.0 * torch.rand(ROWS, COLUMNS, 1, generator=g) * weight[ids]
        leaves = (hidden, weight, normal(VOCAB) / 10)
        self.hidden, self.weight, self.bias = (leaf.to(DEVICE, LOW).requires_grad_() for leaf in leaves)
        self.ids, self.advantages = ids.to(DEVICE), normal(ROWS).to(DEVICE)
        self.advantages[1] = 0.0
        self.mask = torch.rand(ROWS, COLUMNS, generator=g).to(DEVICE) < 0.8
        self.columns = columns

    @property
    def leaves(self):
        return self.hidden, self.weight, self.bias

    def loss(self, loss, **kwargs):
        given = (*self.leaves[:2], self.ids, self.advantages, self.mask)
        return loss(*given, bias=self.bias, **self.columns, **kwargs)


def in_the_backward(monkeypatch):
    monkeypatch.setattr(grpo, "blocks_in_forward", lambda *_: False)


def columns(batch):
    g = torch.Generator(DEVICE).manual_seed(1)
    old = torch.randn(batch.ids.shape, generator=g, device=DEVICE) - 2.0
    return {"old_per_token_logps": old, "ref_per_token_logps": old.roll(1)}


PRESETS = [
    ("dapo", {"beta": 0.0}),
    ("grpo", {"beta": 0.1}),
    ("cispo", {"metrics": "none"}),
    ("gspo", {}),  # from here on no kernel knows the loss, and autograd differentiates it
    ("dapo", {"entropy_coef": 0.1}),
    ("dapo", {"metrics": "with_entropy"}),
    ("dapo", {"corrections": [TopEntropyMask(top_entropy_quantile=0.5)]}),
]


@pytest.mark.parametrize(
    ("preset", "options"), PRESETS, ids=[f"{name}-{'-'.join(options)}" for name, options in PRESETS]
)
def test_same_numbers(preset, options, choices, monkeypatch):
    batch = Batch()
    batch.columns = columns(batch)
    loss = FusedLinearGRPOLoss(preset, grad_tolerance=1e-2, **options)
    ahead = batch.loss(loss)
    assert choices == ["forward"]
    found = torch.autograd.grad(ahead.loss, batch.leaves)
    assert choices == ["forward"]
    in_the_backward(monkeypatch)
    expected = batch.loss(loss)
    assert choices == ["forward"]
    of_expected = torch.autograd.grad(expected.loss, batch.leaves)
    assert choices == ["forward", "backward"]
    assert torch.equal(ahead.loss, expected.loss)
    assert all(map(torch.equal, found, of_expected))
    assert found[1].abs().max() > 0
    assert ahead.metrics.keys() == expected.metrics.keys()
    for name, metric in ahead.metrics.items():
        assert torch.equal(metric.total, expected.metrics[name].total), name


def test_a_factor_and_a_graph_that_is_kept(choices, monkeypatch):
    """Every multiple of the gradients leaves the same blocks out."""
    batch, loss = Batch(), FusedLinearGRPOLoss("dapo", beta=0.0, grad_tolerance=1e-2)
    value = batch.loss(loss).loss
    once = torch.autograd.grad(value, batch.leaves, retain_graph=True)
    again = torch.autograd.grad(value, batch.leaves, retain_graph=True)
    # Large enough for float16 to have no subnormal number among what is compared.
    large, larger = (torch.autograd.grad(value * factor, batch.leaves, retain_graph=True) for factor in (4096, 8192))
    none = torch.autograd.grad(value * 0.0, batch.leaves)
    assert choices == ["forward"]
    assert all(map(torch.equal, once, again))
    for one, two in zip(large, larger, strict=True):
        compared = one.abs() > 1e-2 * one.abs().max()
        torch.testing.assert_close(one[compared] * 2, two[compared], rtol=2e-3, atol=0.0)
    assert not any(part.any() for part in none)


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (1, 2)])
def test_frozen_inputs(frozen):
    batch, loss = Batch(), FusedLinearGRPOLoss("dapo", beta=0.0, grad_tolerance=1e-2)
    everything = torch.autograd.grad(batch.loss(loss).loss, batch.leaves)
    for place in frozen:
        batch.leaves[place].requires_grad_(False)
    wanted = [leaf for leaf in batch.leaves if leaf.requires_grad]
    rest = torch.autograd.grad(batch.loss(loss).loss, wanted)
    expected = [part for place, part in enumerate(everything) if place not in frozen]
    assert all(map(torch.equal, rest, expected))


def test_no_choice_without_a_backward(choices):
    batch, loss = Batch(), FusedLinearGRPOLoss("dapo", beta=0.0, grad_tolerance=1e-2)
    with torch.no_grad():
        batch.loss(loss)
    for leaf in batch.leaves:
        leaf.requires_grad_(False)
    batch.loss(loss)
    assert not choices


def test_tokens_that_do_not_count(choices):
    """NaN in masked tokens stays where it is, and no token at all is no error."""
    batch, loss = Batch(), FusedLinearGRPOLoss("dapo", beta=0.0, grad_tolerance=1e-2)
    with torch.no_grad():
        batch.hidden[~batch.mask] = torch.nan
    found = torch.autograd.grad(batch.loss(loss).loss, batch.leaves)
    assert all(part.isfinite().all() for part in found)
    assert not found[0][~batch.mask].any()
    assert not found[0][1].any()  # of the sequence without an advantage
    batch.mask = torch.zeros_like(batch.mask)
    assert not any(part.any() for part in torch.autograd.grad(batch.loss(loss).loss, batch.leaves))
    assert choices[0] == "forward"


@pytest.mark.parametrize(
    "options",
    [{"passes": "two"}, {"max_extra_bytes": 2**30}, {"chunk_vocab": 512}, {"grad_tolerance": 0.0}],
    ids=lambda options: next(iter(options)),
)
def test_what_is_left_to_the_backward(options, choices):
    batch = Batch()
    value = batch.loss(FusedLinearGRPOLoss("dapo", **{"grad_tolerance": 1e-2, "beta": 0.0, **options})).loss
    assert not choices
    torch.autograd.grad(value, batch.leaves)
    assert choices == (["backward"] if options in ({"passes": "two"}, {"max_extra_bytes": 2**30}) else [])


def test_tensors_that_leave_it_to_the_backward(choices, monkeypatch):
    """A temperature for each token, adapters, a weight in another dtype, and float16, which nothing has scaled yet."""
    batch, options = Batch(), {"beta": 0.0, "grad_tolerance": 1e-2}
    term = LowRank(a=torch.ones(2, 64, dtype=LOW, device=DEVICE), b=torch.ones(VOCAB, 2, dtype=LOW, device=DEVICE))
    warm = torch.full(batch.ids.shape, 0.9, device=DEVICE)
    batch.loss(FusedLinearGRPOLoss("dapo", temperature=warm, **options))
    batch.loss(FusedLinearGRPOLoss("dapo", **options), low_rank=(term,))
    monkeypatch.setattr(blocks_loss, "NARROW", (LOW,))
    batch.loss(FusedLinearGRPOLoss("dapo", **options))
    monkeypatch.setattr(blocks_loss, "NARROW", ())
    batch.weight = batch.weight.detach().float().requires_grad_()
    batch.bias = batch.bias.detach().float().requires_grad_()
    with torch.autocast(DEVICE.type, LOW):
        batch.loss(FusedLinearGRPOLoss("dapo", **options))
    assert not choices


def test_an_id_outside_of_the_vocabulary():
    batch, loss = Batch(), FusedLinearGRPOLoss("dapo", beta=0.0, grad_tolerance=1e-2)
    batch.ids[batch.mask.nonzero()[0].tolist()[0], batch.mask.nonzero()[0].tolist()[1]] = VOCAB
    with pytest.raises(ValueError, match=rf"selected_token_ids .*\b{VOCAB}\b"):
        batch.loss(loss)


def test_where_no_product_has_bounds(choices, monkeypatch):
    """Too few tokens, say: then the backward is exact."""
    batch, loss = Batch(), FusedLinearGRPOLoss("dapo", beta=0.0, grad_tolerance=1e-2)
    forward = block_sparse.forward
    monkeypatch.setattr(block_sparse, "forward", lambda *given: (forward(*given)[0], None))
    found = batch.loss(loss)
    got = torch.autograd.grad(found.loss, batch.leaves)
    assert not choices
    exact = batch.loss(FusedLinearGRPOLoss("dapo", beta=0.0, grad_tolerance=0.0))
    assert torch.equal(found.loss, exact.loss)
    for mine, other in zip(got, torch.autograd.grad(exact.loss, batch.leaves), strict=True):
        # Logits' gradients on both sides of a rounding to 16 bits, summed over tokens or vocabulary.
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-3 * other.abs().max().item())


def test_no_second_derivative():
    batch, loss = Batch(), FusedLinearGRPOLoss("dapo", beta=0.0, grad_tolerance=1e-2)
    grad, *_ = torch.autograd.grad(batch.loss(loss).loss, batch.leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        grad.float().square().sum().backward()


def test_the_loss_may_be_divided_in_place():
    batch, loss = Batch(), FusedLinearGRPOLoss("dapo", beta=0.0, grad_tolerance=1e-2)
    whole, halved = batch.loss(loss).loss, batch.loss(loss).loss
    halved /= 2
    pairs = ((whole, 4096.0), (halved, 8192.0))
    found = (torch.autograd.grad(value, batch.leaves, torch.full_like(value, factor)) for value, factor in pairs)
    assert all(map(torch.equal, *found))


def test_a_large_head_leaves_it_to_the_backward(choices, monkeypatch):
    monkeypatch.setattr(blocks_loss, "SMALL_HEAD", VOCAB * 64 - 1)
    Batch().loss(FusedLinearGRPOLoss("dapo", beta=0.0, grad_tolerance=1e-2))
    assert not choices


def test_it_is_what_runs(monkeypatch):
    """By default, without a tolerance named."""
    calls, own = [], blocks_loss.loss_in_blocks
    monkeypatch.setattr(grpo, "loss_in_blocks", lambda *given: calls.append(1) or own(*given))
    Batch().loss(FusedLinearGRPOLoss("dapo", beta=0.0))
    assert calls
