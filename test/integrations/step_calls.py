"""Batches of steps, and the same steps spelt out with full logits of the padded batch."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import oracles
from hf_models import VOCAB, assert_same_gradients, build, full, gradients
from liger_rl import FusedLinearGRPOLoss, loss_steps, ppo_loss_fn
from liger_rl.losses import PolicyBatch
from liger_rl.step import layout

BATCH, LENGTH = 6, 13
# First attended token, first completion token, end, of each row. The last row has no completion token that counts.
SPANS = {
    "right": [(0, 3, 13), (0, 2, 9), (0, 4, 12), (0, 3, 7), (0, 2, 10), (0, 5, 5)],
    "left": [(0, 3, 13), (2, 5, 13), (5, 9, 13), (3, 6, 13), (1, 2, 13), (4, 13, 13)],
    "both": [(0, 5, 13), (2, 5, 9), (1, 5, 12), (3, 5, 7), (4, 5, 10), (2, 5, 5)],
}
IDLE = 2  # the row whose advantages are 0
INPUTS = ("input_ids", "attention_mask", "position_ids")


def small_llama(device="cpu") -> nn.Module:
    return build("Llama", device, num_hidden_layers=1)


def make_batch(padding="both", *, positions=False, mask=True, device="cpu") -> dict:
    generator = torch.Generator().manual_seed(1)
    first, begin, end = (torch.tensor(numbers)[:, None] for numbers in zip(*SPANS[padding], strict=True))
    column = torch.arange(LENGTH)
    attended = (column >= first) & (column < end)
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)
    batch = {
        "input_ids": torch.where(attended, ids, 0),
        "mask": attended & (column >= begin),
        "advantages": torch.tensor([1.0, -0.5, 0.0, 2.0, -1.5, 0.7]),
        "num_items_in_batch": 31,
    }
    if mask:
        batch["attention_mask"] = attended.long()
    if positions:
        batch["position_ids"] = (attended.cumsum(-1) - 1).clamp(min=0)
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def rows_of(batch: dict, rows) -> dict:
    return {name: value[rows] if isinstance(value, Tensor) else value for name, value in batch.items()}


def packed(batch: dict) -> tuple[dict, Tensor]:
    """-> the attended tokens of all sequences in one row, (1, N), with their positions; and each token's sequence."""
    real = batch["attention_mask"].bool()
    sequence = torch.arange(len(real))[:, None].expand_as(real)[real]
    columns = {name: value[real][None] for name, value in batch.items() if getattr(value, "shape", None) == real.shape}
    columns["position_ids"] = (real.cumsum(-1) - 1)[real][None]
    columns["advantages"] = batch["advantages"][sequence][None]
    del columns["attention_mask"]
    return columns, sequence


@contextmanager
def sharing(shares: bool) -> Iterator[None]:
    """Inside of it a model whose rows can be trees has trees, however little they save; or none has."""
    never = dict.fromkeys(("cpu", "cuda"), math.inf)
    constants = {"MAX_TREE_FRACTION": math.inf, "MIN_TREE_TOKENS": {}, "MAX_DENSE_TOKENS": {}}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (constants if shares else {"MIN_TREE_TOKENS": never}).items():
            patch.setattr(layout, name, value)
        yield


def full_step(model: nn.Module, batch: dict, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """(B, T) log-probabilities and entropies of the tokens themselves, from full logits; column 0 is 0."""
    inputs = {name: batch[name] for name in INPUTS if name in batch}
    return full(model, {**inputs, "labels": batch["input_ids"]}, temperature)


def with_columns(model: nn.Module, batch: dict, temperature: float = 1.0) -> dict:
    """The columns that losses compare with, a little off the policy."""
    logps = full_step(model, batch, temperature)[0].detach()
    noise = torch.randn(2, *logps.shape, generator=torch.Generator().manual_seed(2)).to(logps.device)
    columns = {"old_per_token_logps": logps + 0.3 * noise[0], "ref_per_token_logps": logps + 0.3 * noise[1]}
    return {**batch, **columns}


def expected_step(model: nn.Module, batch: dict, loss: FusedLinearGRPOLoss, outputs: tuple | None = None):
    """-> loss, metrics, gradients and log-probabilities: of `ppo_loss_fn` of full logits, plus the router loss.

    `outputs` are other log-probabilities and entropies than those of the model's own logits.
    """
    logps, entropy = full_step(model, batch, loss.transform.temperature) if outputs is None else outputs
    names, terms = set(PolicyBatch.__dataclass_fields__) & set(batch), loss.terms
    expected = ppo_loss_fn(
        logps, PolicyBatch(**{name: batch[name] for name in names}), terms.objective, terms.reduction, entropy=entropy,
        kl=terms.kl, entropy_bonus=terms.entropy_bonus, corrections=terms.corrections, metrics=terms.metrics,
    )  # fmt: skip
    total = expected.loss
    if getattr(model.config, "output_router_logits", False):
        total = total + 0.1 * model(**{name: batch[name] for name in INPUTS if name in batch}).aux_loss
    return total.detach(), expected.metrics, gradients(model, total), logps.detach()


def run(model: nn.Module, batch: dict, loss: FusedLinearGRPOLoss, **options):
    """-> the iterator after its last backward, and the summed gradients."""
    model.zero_grad()
    steps = loss_steps(model, batch, loss, **options)
    for step in steps:
        step.loss.backward()
    return steps, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_metrics(metrics: dict, expected: dict, atol: float = 1e-5) -> None:
    values = ({name: getattr(x, "value", x) for name, x in part.items()} for part in (metrics, expected))
    torch.testing.assert_close(*values, rtol=1e-4, atol=atol)


class Bounds(NamedTuple):
    """Of differences: of the loss and of a log-probability, and of the gradients in shares of their size."""

    loss: float = 1e-5
    logps: float = 1e-5
    gradients: float = 1e-5


EXACT = Bounds()


def widen_bounds(padded: tuple, *others: tuple) -> Bounds:
    """Bounds for a batch that rounding moves far: three times what it moves the padded batch.

    `others`: the padded batch in float64, or with other rounding. All are as `expected_step` returns them.
    """
    loss, _, grads, logps = padded
    bounds = EXACT
    for other, _, other_grads, other_logps in others:
        known = logps.isfinite() & other_logps.isfinite()
        moved = (
            (loss - other).abs(),
            (logps - other_logps)[known].abs().max(),
            oracles.relative_error(oracles.whole(grads), oracles.whole(other_grads)),
        )
        bounds = Bounds(*(bound + 3 * float(far) for bound, far in zip(bounds, moved, strict=True)))
    return bounds


def assert_as_padded(
    model: nn.Module, batch: dict, loss, expected: tuple | None = None, bounds: Bounds = EXACT, **options
):
    """Loss, metrics, log-probabilities and gradients are those of full logits; the batch is left alone.

    `expected`: as `expected_step` returns them, some metrics are enough; of a policy loss it is called here.
    """
    before = {name: torch.as_tensor(value).clone() for name, value in batch.items()}
    total, metrics, truth, logps = expected_step(model, batch, loss) if expected is None else expected
    steps, grads = run(model, batch, loss, **options)
    torch.testing.assert_close(steps.total.loss, total, rtol=1e-5, atol=bounds.loss)
    found = steps.total.metrics
    found = found if expected is None else {name: found[name] for name in metrics}
    assert_same_metrics(found, metrics, atol=max(bounds.loss, bounds.logps))
    seen, mask = steps.total.per_token_logps, batch["mask"].bool() | batch.get("nll_mask", False)
    known = seen.isfinite()
    torch.testing.assert_close(seen[known & mask], logps[known & mask], rtol=1e-5, atol=bounds.logps)
    assert not seen.requires_grad
    assert not seen[~mask].any()
    if any(grad.any() for grad in truth.values()):
        assert_same_gradients(grads, truth, bounds.gradients)
    else:  # as where all tokens are clipped
        assert not any(grad.any() for grad in grads.values())
    assert before.keys() == batch.keys()
    assert all(torch.equal(torch.as_tensor(batch[name]), value) for name, value in before.items())
    return steps


class Calls(list):
    """(shape of the token ids, whether there is a graph, names of other tensors) of each forward of a model's body."""

    def __init__(self, model: nn.Module) -> None:
        self.hook = model.base_model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, module, args, kwargs) -> None:
        names = {name for name, value in kwargs.items() if isinstance(value, Tensor)} - {"input_ids"}
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self.append((tuple(ids.shape), torch.is_grad_enabled(), names))
