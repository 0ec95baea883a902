"""Megatron-Core's output processor over ranks: against full logits, and in Megatron's own GPTModel.

The layer is Megatron's own where it is there (see `checkouts`). Then its model and cross entropy are compared, too.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import megatron_layers
import oracles
from checkouts import needs
from liger_rl import Support
from liger_rl.integrations.megatron import fused_loss, fused_output
from ranks import assert_whole, message_of

HIDDEN, VOCAB, LENGTH, BATCH = 12, 40, 8, 2


@dataclass(frozen=True)
class Case:
    sequence_parallel: bool = False
    tied: bool = False
    scale: float = 1.0
    temperature: str = "number"
    fusion: bool = False
    dtype: torch.dtype = torch.float32


def problem(case, device="cpu"):
    torch.manual_seed(3)
    hidden, weight = torch.randn(LENGTH, BATCH, HIDDEN), torch.randn(VOCAB, HIDDEN)
    labels = torch.randint(VOCAB, (BATCH, LENGTH))
    labels[0, 2] = -100
    mask = torch.rand(BATCH, LENGTH).round(decimals=1) * (torch.rand(BATCH, LENGTH) < 0.8)
    upstream = torch.randn(2, BATCH, LENGTH)
    temperature = 0.8 if case.temperature == "number" else 0.5 + torch.rand(BATCH, LENGTH)
    given = hidden.to(case.dtype), weight.to(case.dtype), labels, mask, upstream, temperature
    return [value.to(device) if isinstance(value, torch.Tensor) else value for value in given]


def solve(rank, case):
    """-> logps, entropy, this rank's gradients of hidden and weight, by name."""
    hidden, weight, labels, mask, upstream, temperature = problem(case, rank.device)
    index, world = rank.index, rank.world
    weight = weight.chunk(world)[index].clone()
    layer = megatron_layers.output_layer(weight, rank.group, sequence_parallel=case.sequence_parallel)
    hidden = hidden.chunk(world)[index].clone() if case.sequence_parallel else hidden
    hidden.requires_grad_()
    tied = torch.nn.Parameter(weight) if case.tied else None
    parameter = layer.weight if tied is None else tied
    if case.fusion:
        layer.gradient_accumulation_fusion = True
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.ones_like(weight).float(), False
        parameter.zero_out_wgrad = True
    out = fused_output(
        hidden_states=hidden,
        output_layer=layer,
        output_weight=tied,
        labels=labels,
        loss_mask=mask,
        scale_logits=lambda logits: case.scale * logits,
        context={"entropy": True, "temperature": temperature},
        runtime_gather_output=None,
    )
    assert "_forward_impl" not in vars(layer)
    (out.logps * upstream[0] + out.entropy * upstream[1]).sum().backward()
    grad = parameter.grad
    if case.fusion:
        assert parameter.grad_added_to_main_grad
        assert not grad.any()
        grad = parameter.main_grad - 1
    found = {"logps": out.logps, "entropy": out.entropy, "grad_hidden": hidden.grad, "grad_weight": grad}
    return {name: value.detach().cpu() for name, value in found.items()}


def expected(case):
    hidden, weight, labels, mask, upstream, temperature = problem(case)
    leaves = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    heat = temperature.T[..., None] if isinstance(temperature, torch.Tensor) else temperature
    logits = case.scale * (leaves[0] @ leaves[1].T) / heat
    values = oracles.logits_logprobs(logits.transpose(0, 1), labels.clamp(min=0))
    live = (mask != 0) & (labels >= 0)
    values = [torch.where(live, value, 0.0) for value in values]
    total = sum((value * factor).sum() for value, factor in zip(values, upstream, strict=True))
    grads = [grad.to(case.dtype) for grad in torch.autograd.grad(total, leaves)]
    grads[1] = grads[1].float() if case.fusion else grads[1]
    found = *(value.detach().float() for value in values), *grads
    return dict(zip(("logps", "entropy", "grad_hidden", "grad_weight"), found, strict=True))


CASES = [
    Case(),
    Case(sequence_parallel=True),
    Case(tied=True, scale=0.25),
    Case(sequence_parallel=True, temperature="of tokens"),
    Case(fusion=True),
    Case(fusion=True, tied=True, sequence_parallel=True, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_full_logits(ranks, case, world):
    assert_whole(ranks.run(solve, case, **world), expected(case), 1e-5, 1e-5 if case.dtype == torch.float32 else 2e-2)


def test_one_rank(ranks):
    case = Case(sequence_parallel=True)
    assert_whole(ranks.run(solve, case, world=1), expected(case), 1e-5, 1e-5)


def context_parallel(rank):
    """Two context parallel ranks of two vocabulary ranks each: outputs are the rank's own tokens."""
    tensor, context = rank.index % 2, rank.index // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    hidden, weight, labels, mask, *_ = problem(Case())
    part = slice(context * LENGTH // 2, (context + 1) * LENGTH // 2)
    layer = megatron_layers.output_layer(weight.chunk(2)[tensor].clone(), groups[context])
    return fused_loss(
        hidden_states=hidden[part],
        output_layer=layer,
        output_weight=None,
        labels=labels[:, part],
        loss_mask=mask[:, part],
        scale_logits=lambda logits: logits,
        context={"temperature": 0.8},
    ).detach()


def test_context_parallel_ranks_keep_their_tokens(ranks):
    results, truth = ranks.run(context_parallel, world=4), expected(Case())["logps"]
    for halves in (results[::2], results[1::2]):
        torch.testing.assert_close(torch.cat(halves, 1), -truth, rtol=1e-5, atol=1e-5)


# What the call is given otherwise, and how the error begins.
REFUSALS = {
    "output_layer": (
        torch.nn.Linear(HIDDEN, VOCAB),
        "TypeError: output_layer must be a ColumnParallelLinear with its own forward, got Linear",
    ),
    "no labels": (None, "TypeError: labels must be a tensor"),
    "loss_mask": (torch.ones(BATCH, LENGTH - 1), "ValueError: loss_mask must be (b, s) = (2, 8), got (2, 7)"),
    "inference_context": (object(), "ValueError: inference_context must be None, got object"),
    "scale_logits": (torch.tanh, "ValueError: scale_logits must multiply by a number"),
    "context": ({"softcap": 30.0}, "TypeError: output_processor_context must hold temperature, entropy, support"),
    "labels' shape": (torch.zeros(BATCH, LENGTH - 1).long(), "ValueError: labels must be (b, s) = (2, 8), got (2, 7)"),
    "labels' values": (torch.full((BATCH, LENGTH), VOCAB), "ValueError: targets must be"),
}


def refusals(rank):
    """-> messages, by name; nothing is left behind on the layer."""
    hidden, weight, labels, *_ = problem(Case())
    layer = megatron_layers.output_layer(weight.clone(), rank.group)
    given = {
        "hidden_states": hidden, "output_layer": layer, "output_weight": None, "labels": labels,
        "scale_logits": lambda logits: logits,
    }  # fmt: skip
    found = {}
    for name, (value, _) in REFUSALS.items():
        changed = {"labels" if "labels" in name else name: value}
        found[name] = message_of(partial(fused_output, **given | changed))
    hook = layer.register_forward_hook(lambda _layer, _args, output: (output[0] * 2, None))
    found["hooks"] = message_of(lambda: fused_output(**given))
    hook.remove()
    layer.config.defer_embedding_wgrad_compute = True
    found["deferred"] = message_of(lambda: fused_output(**given))
    layer.config.defer_embedding_wgrad_compute = False
    layer.weight.__fsdp_param__ = True
    found["fsdp"] = message_of(lambda: fused_output(**given))
    del layer.weight.__fsdp_param__
    layer.gradient_accumulation_fusion, layer.weight.main_grad = True, torch.zeros_like(weight).bfloat16()
    found["main_grad"] = message_of(lambda: fused_output(**given))
    layer.gradient_accumulation_fusion = False
    import megatron.core

    with patch.object(megatron.core, "__version__", "0.17.1"), pytest.raises(ImportError, match=r"found 0\.17\.1"):
        fused_output(**given)
    layer.forward = lambda *_: None
    found["forward"] = message_of(lambda: fused_output(**given))
    del layer.forward
    assert "_forward_impl" not in vars(layer)
    calls = []
    layer.register_forward_pre_hook(lambda *_: calls.append(vars(layer)["_forward_impl"]))
    fused_output(**given)
    assert len(calls) == 1  # what waits for gathered parameters
    return found


def test_what_is_not_reproduced_is_refused(ranks):
    (found,) = ranks.run(refusals, world=1)
    begins = {name: beginning for name, (_, beginning) in REFUSALS.items()} | {
        "hooks": "ValueError: output_layer must have no hooks that change its output",
        "deferred": "ValueError: defer_embedding_wgrad_compute must be False",
        "fsdp": "ValueError: output_layer must not be sharded by Megatron-FSDP",
        "main_grad": "TypeError: main_grad of output_layer's weight must be float32",
        "forward": "TypeError: output_layer must be a ColumnParallelLinear with its own forward",
    }
    assert found.keys() == begins.keys()
    for name, beginning in begins.items():
        assert found[name].startswith(beginning), found[name]


def replayed(rank):
    hidden, weight, labels, *_ = problem(Case())
    layer = megatron_layers.output_layer(weight.chunk(rank.world)[rank.index].clone(), rank.group)
    rows = [[int(i), (int(i) + 1) % VOCAB] for i in labels.clamp(min=0).flatten()]
    out = fused_output(
        hidden_states=hidden,
        output_layer=layer,
        output_weight=None,
        labels=labels,
        scale_logits=lambda logits: logits,
        context={"support": Support.from_vllm(rows)},
    )
    assert not out.missing_target.any()
    return out.logps.detach()


def test_a_support_is_replayed(ranks):
    """Its rows are in the order of labels, (b, s), and not of hidden states, (s, b)."""
    hidden, weight, labels, *_ = problem(Case())
    ids = torch.stack([labels.clamp(min=0), (labels.clamp(min=0) + 1) % VOCAB], -1)
    pair = (hidden @ weight.T).transpose(0, 1).gather(-1, ids)
    truth = torch.where(labels >= 0, pair.log_softmax(-1)[..., 0], 0.0)
    for found in ranks.run(replayed, world=2):
        torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5)


# --- Megatron's own ---------------------------------------------------------------------------------------------------


def losses_of(rank, model, processor):
    torch.manual_seed(1 + rank.index // 2)  # data parallel ranks have other tokens
    ids, upstream = torch.randint(64, (2, 12)), torch.rand(2, 12)
    causal = torch.ones(1, 1, 12, 12).tril() < 0.5
    losses = model(ids, torch.arange(12).expand(2, -1), causal, labels=ids, output_processor=processor)
    (losses * upstream).sum().backward()
    return losses.detach()


def in_gpt_model(rank, sequence_parallel, tied, mup):
    """-> Megatron's losses and gradients, and the same with the processor."""
    results = []
    with megatron_layers.gpt_model(sequence_parallel, tied, mup) as model:
        for processor in (None, fused_loss):
            model.zero_grad()
            losses = losses_of(rank, model, processor)
            results.append((losses, {name: p.grad for name, p in model.named_parameters()}))
    return results


@needs("Megatron-LM")
@pytest.mark.parametrize(("sequence_parallel", "tied", "mup"), [(False, False, True), (True, True, False)])
def test_in_megatrons_model(ranks, sequence_parallel, tied, mup):
    """Its own losses by its vocabulary-parallel cross entropy, and the gradient of every parameter."""
    for (losses, grads), (found, found_grads) in ranks.run(in_gpt_model, sequence_parallel, tied, mup, world=4):
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-5)
        for name, grad in grads.items():
            torch.testing.assert_close(found_grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)


def in_data_parallel(rank, tied):
    """-> gradients that Megatron's data parallelism reduced, its own and with the head's in place in `main_grad`."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    results = []
    for processor in (None, fused_loss):
        with megatron_layers.gpt_model(False, tied, False) as model:
            options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
            wrapped = DistributedDataParallel(config=model.config, ddp_config=options, module=model)
            model.output_layer.gradient_accumulation_fusion = processor is not None
            for _step in range(2):
                wrapped.zero_grad_buffer()
                for micro_batch in range(2):
                    with wrapped.no_sync() if micro_batch == 0 else nullcontext():
                        losses_of(rank, wrapped, processor)
                wrapped.finish_grad_sync()
            head = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
            assert head.grad is None
            assert head.grad_added_to_main_grad == (processor is not None)
            results.append({name: p.main_grad.clone() for name, p in model.named_parameters()})
    return results


@needs("Megatron-LM")
@pytest.mark.parametrize("tied", [False, True])
def test_in_megatrons_data_parallelism(ranks, tied):
    """Two steps of two micro-batches; the second step's gradients are reduced as soon as the hooks of weights run."""
    for grads, found in ranks.run(in_data_parallel, tied, world=4):
        for name, grad in grads.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6, msg=name)


def bypassing(*, hidden_states, output_layer, labels, **_):
    """The layer's weight without its hooks."""
    return (hidden_states @ output_layer.weight.T).transpose(0, 1).logsumexp(-1) + 0 * labels


def late_losses(rank, processor):
    """Half of every parameter arrives during the second forward."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = DistributedDataParallelConfig(
        overlap_grad_reduce=True, use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=1
    )
    with megatron_layers.gpt_model(False, False, False) as model:
        wrapped = DistributedDataParallel(config=model.config, ddp_config=options, module=model)
        for step in range(2):
            wrapped.zero_grad_buffer()
            for bucket in (bucket for buffer in wrapped.buffers for bucket in buffer.buckets if step):
                bucket.param_data.chunk(2)[1 - rank.index // 2].fill_(torch.nan)  # the other rank's
            losses = losses_of(rank, wrapped, processor)
            wrapped.finish_grad_sync()
    return losses


def with_late_parameters(rank):
    """-> Megatron's losses, and ours."""
    megatron_layers.load()
    with pytest.raises(AssertionError):  # Megatron sees that the head's gather was not waited for
        late_losses(rank, bypassing)
    return late_losses(rank, None), late_losses(rank, fused_loss)


@needs("Megatron-LM")
def test_parameters_that_are_gathered_late(ranks):
    for theirs, found in ranks.run(with_late_parameters, world=4):
        torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-5)
