"""Preference and supervised losses from token ids: their columns and errors. The numbers: test_fuzz_steps.py."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import oracles
from hf_models import VOCAB, build, gradients
from liger_rl import (
    FusedLinearCrossEntropyLoss,
    FusedLinearPreferenceLoss,
    completion_logps,
    loss_step,
    loss_steps,
)
from step_calls import Calls, assert_as_padded, sharing, small_llama

PAIRS, LENGTH = 3, 24
PROMPTS, ENDS = [10, 7, 9], [20, 14, 24, 18, 24, 15]


def batch_of_pairs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    column, prompts, ends = torch.arange(LENGTH), torch.tensor(PROMPTS * 2)[:, None], torch.tensor(ENDS)[:, None]
    ids = torch.randint(3, VOCAB, (2 * PAIRS, LENGTH), generator=generator)
    ids[PAIRS:] = torch.where(column < prompts[:PAIRS], ids[:PAIRS], ids[PAIRS:])
    attended = column < ends
    return {
        "input_ids": torch.where(attended, ids, 0),
        "attention_mask": attended.long(),
        "mask": attended & (column >= prompts),
        "ref_logps": torch.linspace(-60, -40, 2 * PAIRS),
    }


def full_logps(model, batch: dict[str, Tensor], mask: Tensor) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
    logps, _ = oracles.logits_logprobs(logits[:, :-1], batch["input_ids"][:, 1:])
    return torch.where(mask, pad(logps, (1, 0)), 0.0)


def test_a_row_of_weight_0_does_not_run():
    model, batch = small_llama(), batch_of_pairs()
    del batch["ref_logps"]
    weights = torch.ones(2 * PAIRS)
    weights[1] = 0.0
    step = loss_step(model, batch | {"token_weights": weights}, FusedLinearCrossEntropyLoss())
    assert step.per_token_logps[1].isnan().any()
    assert step.loss.isfinite()


def test_a_pair_with_an_empty_side_stays_whole():
    model, batch = small_llama(), batch_of_pairs()
    batch["mask"][PAIRS + 1] = False
    margins = full_logps(model, batch, batch["mask"]).sum(1)
    margins = margins - torch.where(batch["mask"].any(1), batch["ref_logps"], 0.0)
    expected = oracles.dpo(margins, 0.1)
    logps = full_logps(model, batch, batch["mask"])
    truth = expected.detach(), {}, gradients(model, expected), logps.detach()
    assert_as_padded(model, batch, FusedLinearPreferenceLoss("dpo"), truth, max_tokens=48)


def test_reference_log_probabilities_of_another_model():
    model, batch, loss = small_llama(), batch_of_pairs(), FusedLinearPreferenceLoss("dpo")
    other = build("Llama", num_hidden_layers=2)
    del batch["ref_logps"]
    batch["ref_logps"] = completion_logps(other, batch, loss)
    torch.testing.assert_close(batch["ref_logps"], full_logps(other, batch, batch["mask"]).detach())
    sums = batch | {"ref_logps": batch["ref_logps"].sum(1)}
    torch.testing.assert_close(loss_step(model, batch, loss).loss, loss_step(model, sums, loss).loss)


def test_columns_are_the_losss_own():
    batch = batch_of_pairs()
    with pytest.raises(ValueError, match=r"no column 'ref_logps'; it has .*token_weights"):
        loss_step(small_llama(), batch, FusedLinearCrossEntropyLoss())
    with pytest.raises(ValueError, match="nll_mask must be"):
        loss_step(small_llama(), batch | {"nll_mask": torch.ones(3)}, FusedLinearPreferenceLoss("dpo"))
    with pytest.raises(ValueError, match="even number of rows, first the chosen ones, got 5"):
        loss_step(small_llama(), {name: x[:5] for name, x in batch.items()}, FusedLinearPreferenceLoss("dpo"))


ORPO = FusedLinearPreferenceLoss("orpo")
BAD_COLUMNS = {
    "a list": Tensor.tolist, "an array": Tensor.numpy, "sparse": Tensor.to_sparse, "meta": lambda x: x.to("meta"),
}  # fmt: skip
BAD_INPUT = {
    "mask of halves": (lambda batch: {"mask": batch["mask"] * 0.5}, {}, "mask must be 0 or 1 at each token; 63 of"),
    "mask of NaN": (lambda batch: {"mask": torch.where(batch["mask"], torch.nan, 0.0)}, {}, "mask must be 0 or 1"),
    "nll_mask": (lambda batch: {"nll_mask": batch["mask"] * 2}, {}, "nll_mask must be 0 or 1 at each token"),
    "attention_mask": (lambda batch: {"attention_mask": batch["mask"][:, 1:]}, {}, r"attention_mask must be \(B, T\)"),
    "position_ids": (lambda batch: {"position_ids": torch.arange(LENGTH)}, {}, r"position_ids must be \(B, T\) ="),
    "bool ids": (lambda batch: {"input_ids": batch["input_ids"] > 5}, {}, "input_ids must be integers, int32 or"),
    "narrow ids": (lambda batch: {"input_ids": batch["input_ids"].byte()}, {}, "input_ids must .*got torch.uint8"),
    "negative ids": (
        lambda batch: {"input_ids": batch["input_ids"].masked_fill(~batch["mask"], -100)}, {},
        r"input_ids must be token ids in \[0, \d+\), got \d+ others",
    ),
    "ids beyond the vocabulary": (
        lambda batch: {"input_ids": batch["input_ids"].masked_fill(batch["mask"], VOCAB)}, {},
        rf"input_ids must be token ids in \[0, {VOCAB}\), got 63 others",
    ),
    "padding that counts": (
        lambda batch: {"attention_mask": 1 - batch["mask"].long()}, {},
        "mask .and nll_mask. must be 0 where attention_mask is 0, got 1 at 63 tokens",
    ),
    "packed rows with a mask": (
        lambda batch: {
            "attention_mask": torch.ones_like(batch["input_ids"]), "position_ids": torch.arange(LENGTH)[None] % 5
        },
        {}, "attention_mask must be left out of packed rows, got one although position_ids begin anew at 24 tokens",
    ),
    **{
        f"{name}, {kind}": (lambda batch, name=name, make=make: {name: make(batch["mask"].int())}, {}, f"^{name} must ")
        for name in ("input_ids", "mask", "attention_mask", "position_ids") for kind, make in BAD_COLUMNS.items()
    },
    "no row": (lambda batch: {name: x[:0] for name, x in batch.items()}, {}, r"one token, got \(0, 24\)"),
    "no column": (lambda batch: {"input_ids": batch["input_ids"][:, :0]}, {}, r"one token, got \(6, 0\)"),
    "max_tokens": (lambda batch: {}, {"max_tokens": 99}, "max_tokens must be given to loss_steps"),
    "group": (lambda batch: {}, {"group": "world"}, "group must be a process group"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "options", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_named_before_the_model_runs(change, options, message):
    model, batch = small_llama(), batch_of_pairs()
    del batch["ref_logps"]
    loss_step(model, batch, ORPO)  # the trials are over
    calls = Calls(model)
    with pytest.raises((TypeError, ValueError), match=message):
        loss_step(model, batch | change(batch), **{"loss": ORPO} | options)
    assert calls == []


@pytest.mark.parametrize("coef", [0.0, 1.0])
def test_the_nll_term_is_of_the_chosen_sequences(coef):
    """An nll_mask of all rows is that of the chosen ones, and the metric has every token of it."""
    model, batch = small_llama(), batch_of_pairs()
    del batch["ref_logps"]
    nll_mask = batch["attention_mask"].bool().clone()
    nll_mask[:, 0] = False
    logps = full_logps(model, batch, nll_mask)
    expected = -logps[:PAIRS][nll_mask[:PAIRS]].mean()
    loss = FusedLinearPreferenceLoss("simpo", nll_coef=coef)
    without = loss_step(model, batch, FusedLinearPreferenceLoss("simpo")).loss
    step = loss_step(model, batch | {"nll_mask": nll_mask}, loss)
    torch.testing.assert_close(step.metrics["nll"].value, expected.detach())
    torch.testing.assert_close(step.loss.detach(), (without + coef * expected).detach())


@pytest.mark.parametrize(("shares", "least"), [(False, 48), (True, 39)])
def test_a_pair_larger_than_max_tokens(shares, least):
    model, batch = small_llama(), batch_of_pairs()
    del batch["ref_logps"]
    message = rf"max_tokens must be at least {least}, the tokens of the pair in rows \[\d, \d\]"
    with sharing(shares), pytest.raises(ValueError, match=message):
        loss_steps(model, batch, ORPO, max_tokens=least - 1)
    # The one pair of a batch has row 1, the first rejected one.
    one = {name: x[[2, 2 + PAIRS]] for name, x in batch.items()}
    with sharing(True):
        steps, calls = loss_steps(model, one, ORPO, max_tokens=39), Calls(model)
        torch.testing.assert_close(next(steps).loss, loss_step(model, one, ORPO).loss)
        assert (len(steps), calls[0][0]) == (1, (1, 39))
        with pytest.raises(ValueError, match=r"max_tokens must be at least 39, the tokens of the pair in rows \[0, 1"):
            loss_steps(model, one, ORPO, max_tokens=38)
