"""LoRA layers as one Function, in models that ranks share: gradients are as far from float32's as PEFT's own."""

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("transformers", reason="the models are transformers'")
pytest.importorskip("peft", reason="PEFT is not installed")

from peft import LoraConfig, inject_adapter_in_model
from test_layout_ranks import gradients
from test_models import VOCAB, tiny_llama, wrap

import oracles
from liger_rl.integrations.peft import patched_peft
from liger_rl.models.lora_linear import sharing_casts
from liger_rl.models.randomness import no_graph

LORA = LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], r=4, init_lora_weights=False)
FUNCTION = "LoraLinearBackward"


def step_of(rank, wrapper, dtype, patch):
    """-> the adapters' gradients of the second optimizer step, and what made the last layer's output."""
    model = inject_adapter_in_model(LORA, tiny_llama()).to(rank.device, dtype)
    last = model.model.layers[-1].mlp.down_proj
    model = wrap(model, rank, wrapper)
    functions = []
    last.register_forward_hook(
        lambda module, args, y: functions.append(y.grad_fn and y.grad_fn.next_functions[0][0].name())
    )
    ids = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(rank.index)).to(rank.device)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    with patched_peft() if patch else nullcontext():
        for _ in range(2):  # a cast of an adapter must not outlive the optimizer's step
            model.zero_grad()
            with sharing_casts(), torch.autocast(rank.device.type, torch.bfloat16, enabled=dtype is None):
                with no_graph():
                    model(input_ids=ids)
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
    return gradients(model), functions[-1]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1", "root"])
def test_gradients_are_peft_s(ranks, wrapper, two):
    exact, theirs, ours = (
        ranks.run(step_of, wrapper, dtype, patch, **two)
        for dtype, patch in ((torch.float64, False), (None, False), (None, True))
    )
    for (truth, _), (other, plain), (mine, function) in zip(exact, theirs, ours, strict=True):
        assert plain != FUNCTION
        # The parameters of a layer are views of one flat parameter there, which has a gradient.
        assert function == (plain if wrapper == "fsdp1" else FUNCTION)
        assert mine.keys() == other.keys() == truth.keys()
        assert all("lora_" in name for name in mine)
        truth, other, mine = (oracles.whole(grads) for grads in (truth, other, mine))
        assert truth.norm() > 0
        assert oracles.relative_error(mine, truth) <= 1.5 * oracles.relative_error(other, truth) + 2**-9
