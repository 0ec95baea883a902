"""A tiny Llama under FSDP2, a tensor-parallel plan or both, its head swapped: trained as one process trains it."""

import copy
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

transformers = pytest.importorskip("transformers", reason="the models are transformers'")

from liger_rl import FusedLinearGRPOLoss, completion_logps, loss_step, swap_lm_head  # noqa: E402
from liger_rl.models.swap import unswap_lm_head  # noqa: E402
from ranks import sent  # noqa: E402

STEPS, BATCH, TIME, VOCAB = 3, 4, 12, 52


def tiny_llama(**changes):
    torch.manual_seed(0)
    config = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "initializer_range": 0.1,
        "attn_implementation": "eager",
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config | changes)).train()


def batch():
    torch.manual_seed(1)
    mask = torch.rand(BATCH, TIME) < 0.6
    mask[:, :3] = False
    mask[1] = False  # a sequence, and on four ranks a rank, without a token that counts
    return {
        "input_ids": torch.randint(VOCAB, (BATCH, TIME)),
        "mask": mask,
        "advantages": torch.randn(BATCH),
    }


def train(model, rows=slice(None), data_ranks=1, summed=1):
    """Losses of the steps; the batch's rows of this rank, of which there are as many as `data_ranks` says. `summed`:
    by how much a gradient is too large."""
    # Before any forward: after one, the parameters of FSDP's root are the gathered ones.
    # Not foreach, the default on CUDA, which takes no list of plain tensors and DTensors.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5, foreach=False)
    whole = {name: column.to(next(model.parameters()).device) for name, column in batch().items()}
    part = {name: column[rows] for name, column in whole.items()}
    count = whole["mask"].sum()
    loss = FusedLinearGRPOLoss("dapo", temperature=0.9, beta=0.05, entropy_coef=0.0, world_size=data_ranks)
    part["old_per_token_logps"] = completion_logps(model, part, loss)
    part["ref_per_token_logps"] = part["old_per_token_logps"] - 0.1
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        step = loss_step(model, part | {"num_items_in_batch": count}, loss)
        step.loss.backward()
        for parameter in model.parameters() if summed > 1 else ():
            parameter.grad.div_(summed)
        optimizer.step()
        losses.append(step.loss.item())
    return losses


def trained(model):
    """Parameters by name, whole and on CPU."""
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).float().cpu() for n, p in named.items()}


@cache
def reference(tied=False):
    model = swap_lm_head(tiny_llama(tie_word_embeddings=tied))
    before = trained(copy.deepcopy(model))
    return train(model), trained(model), before


def assert_trained_alike(results, expected, *, data_ranks, rtol=1e-4):
    losses, parameters, before = expected
    for step in range(STEPS):
        # Each data-parallel rank's loss is its share, times the number of ranks, of the whole batch's.
        shares = {place: found[step] for found, _, place in results}
        assert sum(shares.values()) / data_ranks == pytest.approx(losses[step], rel=rtol, abs=rtol)
    for _, found, _ in results:
        assert found.keys() == parameters.keys()
        for name, truth in parameters.items():
            moved = (truth - before[name]).norm()
            assert moved > 0, name
            assert (found[name] - truth).norm() <= rtol * moved, name


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def shard(model, mesh, unit, policy=None):
    options = {"mesh": mesh} | ({} if policy is None else {"mp_policy": policy})
    for layer in model.model.layers:
        fully_shard(layer, **options)
    if unit == "own":
        fully_shard(model.lm_head, **options)
    fully_shard(model, **options)
    layers = list(model.model.layers)
    layers[0].set_modules_to_forward_prefetch([layers[1]])
    if unit == "own":
        layers[1].set_modules_to_forward_prefetch([model.lm_head])
        model.lm_head.set_modules_to_backward_prefetch([layers[1]])
    return model


def wrap(model, rank, wrapper):
    """The model in DDP, in FSDP1, or sharded by FSDP2 (the `unit` of `shard`)."""
    if wrapper == "ddp":
        return DistributedDataParallel(model, process_group=rank.group)
    if wrapper == "fsdp1":
        policy = ModuleWrapPolicy({type(model.model.layers[0])})
        return FullyShardedDataParallel(
            model, rank.group, auto_wrap_policy=policy, use_orig_params=True, device_id=rank.device
        )
    return shard(model, rank.mesh(), wrapper)


def count_sums(mesh) -> int:
    """By how much a gradient of `fully_shard` is larger than the mean: torch 2.8 sums them over gloo's ranks."""
    layer = torch.nn.Linear(1, mesh.size(), bias=False, device=mesh.device_type)
    fully_shard(layer, mesh=mesh)(torch.ones(1, 1, device=mesh.device_type)).sum().backward()
    summed = round(layer.weight.grad.full_tensor()[0].item())
    assert summed in (1, mesh.size())
    return summed


# --- tensor parallelism -----------------------------------------------------------------------------------------------

HEADS = {
    "local logits": {},
    "logits as a DTensor": {"use_local_output": False},
    "whole logits": {"output_layouts": Replicate()},
    "whole logits as a DTensor": {"output_layouts": Replicate(), "use_local_output": False},
}


def parallelize(model, mesh, head):
    plan = {"lm_head": ColwiseParallel(**head)}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel()
    return parallelize_module(model, mesh, plan)


def transformers_plan(model, mesh, style):
    """transformers' own, whose style of the head is "colwise" or "colwise_gather_output"."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model.tp_plan = {
        **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        **{f"model.layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "lm_head": style,
    }
    if not hasattr(model, "_resolve_parallel_plans"):
        apply_tensor_parallelism(model, mesh)
        return
    # In transformers 5.23 the model writes its plan out, layer by layer.
    from transformers.distributed import DistributedConfig

    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
    apply_tensor_parallelism(model, mesh, plan)


# --- a model that is cut over ranks, trained --------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    unit: str = ""  # "ddp", or of FSDP2 the unit that has the head: the "root", or its "own"
    head: str = ""  # of a tensor-parallel plan: one of HEADS, or a style of transformers' own plan
    swapped: str = "before"  # the head, before the model is cut or after
    mixed: bool = False
    tied: bool = False
    world: int = 2

    @property
    def data_ranks(self) -> int:
        return 1 if not self.unit else self.world if not self.head else 2

    def __str__(self) -> str:
        return "-".join(str(value) if value is not True else key for key, value in vars(self).items() if value)


CUTS = [
    *(Cut(unit, swapped=swapped) for unit in ("root", "own") for swapped in ("before", "after")),
    *(Cut(unit, world=4) for unit in ("ddp", "root", "own")),
    Cut("root", tied=True),
    *(Cut(unit, mixed=True) for unit in ("root", "own")),
    *(Cut(head=head, swapped="after") for head in (*HEADS, "colwise", "colwise_gather_output")),
    Cut(head="local logits", world=4),
    Cut(head="colwise"),
    *(Cut(unit, "local logits", world=4) for unit in ("root", "own")),
]


def train_cut(rank, cut: Cut):
    """What `assert_trained_alike` takes."""
    model = tiny_llama(tie_word_embeddings=cut.tied).to(rank.device)
    mesh = rank.mesh("dp", "tp", shape=(2, 2)) if cut.unit and cut.head else None
    if cut.swapped == "before":
        swap_lm_head(model)
    if cut.head:
        apply = parallelize if cut.head in HEADS else transformers_plan
        apply(model, rank.mesh("tp") if mesh is None else mesh["tp"], HEADS.get(cut.head, cut.head))
    data = rank.mesh() if mesh is None else mesh["dp"]
    wrapped = model
    if cut.unit == "ddp":
        wrapped = wrap(model, rank, cut.unit)
    elif cut.unit:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if cut.mixed else None
        shard(model, data, cut.unit, policy)
    if cut.swapped == "after":
        swap_lm_head(model)
    if cut.unit:
        place, rows = data.get_local_rank(), BATCH // data.size()
        rows = slice(place * rows, (place + 1) * rows)
        losses = train(wrapped, rows, data.size(), 1 if cut.unit == "ddp" else count_sums(data))
        assert isinstance(model.lm_head.weight, DTensor) == (cut.unit != "ddp")
        return losses, trained(model), place
    losses = train(model)
    assert model.lm_head.weight.placements == (Shard(0),)
    plain = model(input_ids=batch()["input_ids"].to(rank.device)).logits
    assert isinstance(plain, DTensor) == ("DTensor" in cut.head)  # the plan's own forward is as it was
    return losses, trained(model), 0


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_cut_model_is_trained_as_the_whole(ranks, cut, two):
    """In bfloat16 as far from float32 as bfloat16 is, and the same wherever the head is gathered."""
    if cut.head and cut.head not in HEADS:
        pytest.importorskip("transformers.distributed.tensor_parallel", reason="transformers 5's plans")
    if cut.world > 2 and two["device"] != "cpu":
        pytest.skip("on GPUs with two ranks")
    results = ranks.run(train_cut, cut, **two | {"world": cut.world})
    rtol = 0.1 if cut.mixed else 1e-4
    assert_trained_alike(results, reference(cut.tied), data_ranks=cut.data_ranks, rtol=rtol)


# --- what sharding does not change ------------------------------------------------------------------------------------


def stays_as_it_was(rank, sharding):
    """-> how often the head's weight is gathered in a fused forward, and in its backward."""
    model, ids, calls = tiny_llama(), batch()["input_ids"], []
    if sharding == "a plan":
        parallelize(model, rank.mesh("tp"), {})
    else:
        shard(model, rank.mesh(), sharding)
    before = model(input_ids=ids).logits
    swap_lm_head(model)
    gather = _fsdp_param_group.foreach_all_gather

    def counted(params, *args, **kwargs):
        calls.extend(param._param_fqn for param in params if param._param_fqn.endswith("lm_head.weight"))
        return gather(params, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fsdp_param_group, "foreach_all_gather", counted)
        for module in model.modules():  # the root is whole since the plain forward
            getattr(module, "reshard", lambda: None)()
        loss = model(input_ids=ids, labels=ids, fused=True).loss
        forward = len(calls)
        loss.backward()
    unswap_lm_head(model)
    assert torch.equal(model(input_ids=ids).logits, before)
    return forward, len(calls) - forward


@pytest.mark.parametrize(("sharding", "gathers"), [("own", (1, 1)), ("root", (1, 0)), ("a plan", (0, 0))])
def test_what_a_sharded_head_does_not_change(ranks, sharding, gathers):
    """It is gathered once in each pass, but FSDP keeps its root for the backward; unswapped it is as it was."""
    assert ranks.run(stays_as_it_was, sharding) == [gathers, gathers]


def notes_compared(rank, shape):
    """How often, while a model is trained: a check per call would be a host sync per call."""
    model = swap_lm_head(tiny_llama())
    mesh = rank.mesh(*("dp", "tp")[2 - len(shape) :], shape=shape if len(shape) > 1 else None)
    parallelize(model, mesh["tp"], {})
    if len(shape) > 1:
        shard(model, mesh["dp"], "own")
    with sent() as calls:
        train(model, data_ranks=len(shape))
    return sum(name == "all_gather_object" for name, _ in calls)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["a plan", "FSDP over a plan"])
def test_ranks_compare_notes_once_per_weight(ranks, shape):
    assert set(ranks.run(notes_compared, shape, world=2 * len(shape))) == {1}
