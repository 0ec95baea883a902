"""Steps whose sequences share prefixes against each row by itself in the plain model, on random batches of every
architecture: losses, log-probabilities and gradients."""

import os
import random
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

import oracles
from hf_models import BEFORE_5, CONFIGS, VOCAB, assert_same_gradients, build, gradients
from liger_rl import FusedLinearCrossEntropyLoss, FusedLinearPreferenceLoss, loss_steps

CASES = max(1, round(0.06 * int(os.environ.get("FUZZ_CASES", "500"))))
# Without a FUZZ_CASES the cases are the same in every run, as in test/fuzz.
SEEDS = range(CASES) if "FUZZ_CASES" not in os.environ else random.SystemRandom().sample(range(2**40), CASES)


@cache
def model_of(name: str) -> nn.Module:
    # The router's loss is of the whole batch, padding included.
    return build(name, **({"output_router_logits": False} if "output_router_logits" in CONFIGS[name] else {}))


def draw_batch(draw: random.Random, pairs: bool, left: bool) -> dict[str, Tensor]:
    """Sequences that continue one of two prompts, or each other, padded on one side."""
    numbers = torch.Generator().manual_seed(draw.getrandbits(32))

    def some(least: int, most: int) -> list[int]:
        return torch.randint(3, VOCAB, (draw.randint(least, most),), generator=numbers).tolist()

    prompts = [some(8, 20), some(8, 20)]
    turn, rows = some(8, 12), []
    for _ in range(draw.randint(2, 3)):
        prompt = draw.choice(prompts)
        rows.append([(prompt + draw.choice(([], turn)) + some(1, 6), len(prompt)) for _ in range(2)])
    sequences = [row for part in zip(*rows, strict=True) for row in part]
    width = max(len(tokens) for tokens, _ in sequences) + draw.randint(0, 2)
    ids, attended, mask = (torch.zeros(len(sequences), width, dtype=torch.long) for _ in range(3))
    for row, (tokens, first) in enumerate(sequences):
        start = width - len(tokens) if left else 0
        ids[row, start : start + len(tokens)] = torch.tensor(tokens)
        attended[row, start : start + len(tokens)] = 1
        mask[row, start + first : start + len(tokens)] = 1
    mask[draw.randrange(len(sequences))] *= 1 if pairs else draw.randint(0, 1)
    return {"input_ids": ids, "attention_mask": attended, "mask": mask}


def logps_of_rows(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """(B, T) of completion tokens, each row by itself and without padding."""
    found = []
    for ids, attended, mask in zip(*(batch[name] for name in ("input_ids", "attention_mask", "mask")), strict=True):
        alone = ids[attended.bool()][None]
        log_p = model(input_ids=alone).logits.float().log_softmax(-1)[:, :-1]
        logps = log_p.gather(-1, alone[:, 1:, None])[0, :, 0]
        place = attended.nonzero()[1:, 0]
        found.append(torch.zeros(ids.shape).index_put((place,), logps) * mask)
    return torch.stack(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_by_themselves(seed):
    draw = random.Random(seed)
    name, pairs, left = draw.choice(sorted(CONFIGS)), draw.random() < 0.5, draw.random() < 0.5
    if name == "RecurrentGemma" and BEFORE_5:
        pytest.skip("in transformers 4.57 a RecurrentGemma without a cache keeps the graph of the forward before")
    model = model_of(name)
    batch = draw_batch(draw, pairs, left)
    if name == "GPT2":  # its default positions are columns
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    options = {"share_prefixes": True, "max_tokens": draw.choice((None, 90))}
    loss = FusedLinearPreferenceLoss("dpo", reference_free=True) if pairs else FusedLinearCrossEntropyLoss()
    try:
        steps = loss_steps(model, batch, loss, **options)
    except ValueError as error:
        if "share_prefixes must not be True here" not in str(error):
            raise
        # Without a tree, only padding on the right leaves every model's rows alone.
        if left:
            batch = draw_batch(draw, pairs, False)
        steps = loss_steps(model, batch, loss)
    logps = logps_of_rows(model, batch)
    if pairs:
        chosen, rejected = logps.sum(1).chunk(2)
        expected = -logsigmoid(0.1 * (chosen - rejected)).mean()
    else:
        expected = -logps.sum() / batch["mask"].sum()
    truth = gradients(model, expected)
    model.zero_grad()
    for step in steps:
        step.loss.backward()
    torch.testing.assert_close(steps.total.loss, expected.detach(), rtol=1e-4, atol=1e-4, msg=f"{name} {steps.layout}")
    seen = steps.total.per_token_logps
    torch.testing.assert_close(
        seen.nan_to_num(0.0), torch.where(seen.isnan(), 0.0, logps.detach()), rtol=1e-4, atol=1e-4
    )
    found = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    if oracles.whole(truth).norm() > 1e-3:
        assert_same_gradients(found, truth)
