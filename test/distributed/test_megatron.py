"""Our output processor in Megatron-Core's own GPTModel, where it is there (see `checkouts`).

Against full logits, on a layer that is Megatron's own if it can be: test_frameworks.py.
"""

from contextlib import nullcontext

import pytest
import torch

import megatron_layers
from checkouts import needs
from liger_rl.integrations.megatron import fused_loss


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
