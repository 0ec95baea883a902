"""Policy optimisation with a tolerance on the gradient stays as close to the exact run as bfloat16 does to float32."""

import copy
from functools import cache

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the model comes from transformers")
from devices import NEEDS_GPU  # noqa: E402
from liger_rl import FusedLinearGRPOLoss  # noqa: E402
from liger_rl.engines.sparse import lists  # noqa: E402
from liger_rl.integrations.transformers import swap_lm_head  # noqa: E402
from texts import sampled  # noqa: E402

pytestmark = pytest.mark.convergence

VOCAB, ROWS, LENGTH, PROMPT = 8192, 8, 96, 16
PRETRAINING, STEPS, STEPS_PER_BATCH = 120, 16, 4
TOLERANCE = 1e-3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rows(generator: torch.Generator) -> Tensor:
    return sampled((ROWS,), LENGTH, VOCAB, generator)


@cache
def pretrained() -> torch.nn.Module:
    """A model that knows which token ids are rare: without that every tile matters to every token."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    model = swap_lm_head(transformers.LlamaForCausalLM(config))
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=5e-3), torch.Generator().manual_seed(0)
    for _ in range(PRETRAINING):
        ids = rows(generator)
        model(input_ids=ids, labels=ids, use_cache=False, fused=True).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def policy(dtype: torch.dtype, head_dtype: torch.dtype, tolerance: float) -> tuple[Tensor, list[float]]:
    """-> parameters and losses after STEPS updates; the same batches and advantages whatever the arguments."""
    model = copy.deepcopy(pretrained()).to(DEVICE, dtype)
    loss_fn = FusedLinearGRPOLoss("grpo", epsilon_high=0.28, beta=0.02, grad_tolerance=tolerance)
    # Plain gradient steps: an error of the gradient is an error of the parameters, which Adam's signs would hide.
    optimizer, generator = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS // STEPS_PER_BATCH):
        ids = rows(generator).to(DEVICE)
        advantages = torch.randn(ROWS, generator=generator).to(DEVICE)
        mask = (torch.arange(1, LENGTH, device=DEVICE) >= PROMPT).expand(ROWS, -1)

        def head(model=model, ids=ids) -> tuple[Tensor, Tensor, Tensor]:
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
            return hidden.to(head_dtype), model.lm_head.weight.to(head_dtype), ids[:, 1:]

        with torch.no_grad():
            old = loss_fn.reference_logps(*head(), mask)
        for _ in range(STEPS_PER_BATCH):
            columns = {"old_per_token_logps": old, "ref_per_token_logps": old}
            loss = loss_fn(*head(), advantages, mask, **columns).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return torch.cat([p.detach().double().flatten() for p in model.parameters()]), losses


@NEEDS_GPU  # elsewhere a tolerance computes the exact gradient
def test_as_close_to_the_exact_run_as_bfloat16_to_float32(monkeypatch):
    shares = []
    plan_parts = lists.plan_parts

    def recorded(choice):
        kept = plan_parts(choice)
        shares.append(kept.share)
        return kept

    monkeypatch.setattr(lists, "plan_parts", recorded)
    monkeypatch.setattr(lists, "dense_share", lambda hidden_size: 1.0)  # a small vocabulary keeps most of its tiles
    start = torch.cat([p.detach().double().flatten() for p in pretrained().parameters()]).to(DEVICE)
    exact, losses = policy(torch.float32, torch.float32, 0.0)
    rounded, _ = policy(torch.bfloat16, torch.bfloat16, 0.0)
    assert not shares
    close, close_losses = policy(torch.float32, torch.bfloat16, TOLERANCE)
    assert len(shares) == STEPS
    assert max(shares) < 1.0, "nothing was left out"
    moved = (exact - start).norm()
    assert 0 < (close - exact).norm() < 0.1 * moved
    assert (close - exact).norm() <= (rounded - exact).norm()
    assert close_losses == pytest.approx(losses, abs=2e-3)
