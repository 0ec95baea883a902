"""verl's functions against full logits in float64, and against verl's own torch backend where its source is there."""

import ast
import importlib
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import checkouts
import oracles
from liger_rl import patch_verl, topk_divergence
from liger_rl.integrations.verl import (
    forward_kl_topk,
    fused_linear_for_ppo,
    linear_cross_entropy,
    patched_verl,
    unpatch_verl,
)

TOKENS, HIDDEN, VOCAB = 23, 12, 137
# (shape of hidden without H, shape of labels): packed, FSDP without padding, padded, Megatron's (S, B, H)
SHAPES = [((TOKENS,), (TOKENS,)), ((1, TOKENS), (1, TOKENS)), ((1, TOKENS), (TOKENS,)), ((TOKENS, 1), (1, TOKENS))]


def problem(device="cpu", dtype=torch.float32):
    hidden = (2 * torch.randn(TOKENS, HIDDEN, device=device)).to(dtype)
    weight = torch.randn(VOCAB, HIDDEN, device=device).to(dtype)
    return hidden, weight, torch.randint(VOCAB, (TOKENS,), device=device)


@pytest.mark.parametrize("reduction", ["sum", "mean", "MEAN"])
def test_reductions(reduction):
    """Of the log-probabilities alone; a mean divides by all tokens, masked ones too, as verl's."""
    leaves = [leaf.requires_grad_() for leaf in problem()[:2]]
    labels = problem()[2]
    labels[4] = -100
    (reduced, entropy), (logps, same) = (linear_cross_entropy(*leaves, labels, 0.6, r) for r in (reduction, "none"))
    expected = logps.sum() / (1 if reduction == "sum" else TOKENS)
    torch.testing.assert_close((reduced, entropy), (expected, same))
    grads = (torch.autograd.grad(value, leaves) for value in (reduced, expected))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(("rows", "ids"), SHAPES)
def test_shapes_as_verl_has_them(rows, ids):
    """FSDP without padding has a first dimension of one, Megatron its tokens before the batch; outputs are flat."""
    hidden, weight, labels = problem()
    expected = linear_cross_entropy(hidden, weight, labels, 0.7)
    strided = hidden.T.contiguous().T.reshape(*rows, HIDDEN).requires_grad_()
    outputs = linear_cross_entropy(strided, weight, labels.reshape(ids), 0.7)
    torch.testing.assert_close(tuple(values.detach() for values in outputs), expected)
    (grad,) = torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), strided)
    assert grad.shape == strided.shape
    assert grad.any()


def test_logits_far_under_zero():
    """A running maximum that starts at 0 has nothing left of them."""
    arguments = torch.ones(3, 1), torch.linspace(-220, -200, VOCAB)[:, None], torch.tensor([0, 60, 136])
    outputs = tuple(values.double() for values in linear_cross_entropy(*arguments))
    torch.testing.assert_close(outputs, oracles.logprobs(*arguments), rtol=1e-5, atol=1e-4)


def test_several_ids_of_a_row():
    hidden, weight, _ = problem()
    ids = torch.randint(VOCAB, (1, TOKENS, 3))
    logps, entropy = linear_cross_entropy(hidden, weight, ids, 0.7)
    apart = [linear_cross_entropy(hidden, weight, of_one, 0.7) for of_one in ids.unbind(-1)]
    torch.testing.assert_close(logps, torch.stack([values for values, _ in apart], dim=-1))
    torch.testing.assert_close(entropy, apart[0][1])
    of_ppo = fused_linear_for_ppo(None, hidden[None], weight, ids, 0.7)
    torch.testing.assert_close(of_ppo, (logps[None], entropy[None]))


# --- the torch backend ------------------------------------------------------------------------------------------------


@pytest.fixture
def verl():
    root = checkouts.verl()
    inner = ("utils", "utils.experimental", "utils.kernel", "models", "models.transformers", "workers")
    inner += ("workers.engine", "workers.engine.fsdp", "trainer", "trainer.distillation", "trainer.distillation.fsdp")
    with checkouts.bare(root, "verl", *(f"verl.{name}" for name in inner)) as package:
        package.__version__ = (root / "version" / "version").read_text().strip()
        yield package


def small_model():
    return importlib.import_module("hf_models").build("Qwen3", vocab_size=VOCAB, num_hidden_layers=1)


def torch_backend(**options):
    return importlib.import_module("verl.utils.experimental.torch_functional").FusedLinearForPPO(**options)


@pytest.mark.parametrize("shape", [(TOKENS,), (1, TOKENS), (3, 5)])
@pytest.mark.parametrize(("temperature", "factors"), [(1.0, (1.0, 0.0)), (0.7, (0.0, 1.0)), (0.7, (1.0, 1.0))])
def test_verls_torch_backend(verl, shape, temperature, factors, device):
    hidden, weight = torch.randn(*shape, HIDDEN, device=device), torch.randn(VOCAB, HIDDEN, device=device)
    labels = torch.randint(VOCAB, shape, dtype=torch.int32, device=device)
    results = []
    for ours in (True, False):
        backend = torch_backend(chunk_size=7)  # made before the patch
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        if ours:
            patch_verl()
        logps, entropy = backend(*leaves, labels, temperature)
        unpatch_verl()
        upstream = torch.linspace(-1, 2, labels.numel(), device=device).view(shape)
        total = factors[0] * (logps * upstream).sum() + factors[1] * (entropy * upstream).sum()
        results.append([logps, entropy, *torch.autograd.grad(total, leaves)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=2e-5)


def test_verls_torch_backend_in_bfloat16(verl):
    """verl rounds logits and entropies to bfloat16."""
    hidden, weight, labels = problem(dtype=torch.bfloat16)
    exact = oracles.logprobs(hidden, weight, labels)
    theirs = torch_backend()(hidden, weight, labels)
    with patched_verl():
        mine = torch_backend()(hidden, weight, labels)
    for values, rounded, truth in zip(mine, theirs, exact, strict=True):
        assert oracles.max_error(values, truth) < 0.1 * oracles.max_error(rounded, truth)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_model_of_verls(verl, backend):
    """Its forward for each backend, by labels and by labels that are shifted already."""
    model = small_model()
    dense = importlib.import_module("verl.models.transformers.dense_common")
    ids = torch.randint(VOCAB, (2, 9))
    expected = oracles.logits_logprobs(model(ids).logits / 0.7, ids.roll(-1, -1))
    patch_verl()
    for labels in ({"labels": ids}, {"shift_labels": ids.roll(-1, -1)}):
        forward = getattr(dense, f"forward_with_{backend}_backend")
        output = forward(model, input_ids=ids, temperature=0.7, return_dict=True, **labels)
        mine = tuple(values.view(2, 9) for values in (output.log_probs, output.entropy))
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_verls_output_processor_for_megatron(tied, monkeypatch):
    """Where verl is installed with what it needs, and Megatron-Core."""
    pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
    pytest.importorskip("verl", reason="verl is not installed")
    fused = importlib.import_module("verl.models.mcore.model_forward_fused")
    monkeypatch.setattr(fused.parallel_state, "get_tensor_model_parallel_group", lambda: None)
    hidden, weight, labels = problem()
    with patched_verl():
        output = fused.fused_output_processor(
            hidden_states=hidden[:, None],
            output_layer=SimpleNamespace(weight=None if tied else weight),
            output_weight=weight if tied else None,
            labels=labels[None],
            context=fused.FusedOutputProcessorContext(temperature=0.7),
            config=SimpleNamespace(sequence_parallel=False),
        )
    expected = oracles.logprobs(hidden, weight, labels, temperature=0.7)
    mine = tuple(values.double() for values in (output.log_probs, output.entropy))
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


def test_arguments_of_the_torch_backend():
    """Those of linear_cross_entropy, but for the shape of what comes back."""
    hidden, weight, labels = problem()
    outputs = fused_linear_for_ppo(None, hidden[None], weight, labels[None], 0.9)
    flat = linear_cross_entropy(hidden, weight, labels, 0.9)
    torch.testing.assert_close(tuple(values[0] for values in outputs), flat, rtol=0, atol=0)
    with pytest.raises(ValueError, match="labels must have 23 elements"):
        fused_linear_for_ppo(None, hidden, weight, labels[1:])


# --- distillation from a teacher's lists ------------------------------------------------------------------------------

LISTED = 6


class Batch(dict):
    batch_size = (2,)


def topk_engine(verl, monkeypatch):
    """verl's own two methods of its engine, whose module cannot be imported without all that verl needs."""
    modules = {name: ModuleType(name) for name in ("verl.utils.tensordict_utils", "verl.workers.config")}
    modules["verl.utils.tensordict_utils"].get_non_tensor_data = lambda data, key, default: data.get(key, default)
    vars(modules["verl.workers.config"]).update(DistillationConfig=None, DistillationLossConfig=None)
    module = modules["verl.workers.engine.fsdp.transformer_impl"] = ModuleType("transformer_impl")
    for name, stub in modules.items():
        monkeypatch.setitem(sys.modules, name, stub)
    vars(module).update(
        torch=torch,
        tu=modules["verl.utils.tensordict_utils"],
        TensorDict=Batch,
        DTensor=(),
        DatasetPadMode=SimpleNamespace(NO_PADDING="no_padding"),
        extract_multi_modal_inputs=lambda inputs: {},
        build_attention_mask_from_nested=lambda **arguments: None,
        logprobs_from_logits=lambda logits, labels, **options: oracles.logits_logprobs(logits, labels)[0],
        verl_F=SimpleNamespace(
            expand_as_nested=lambda values, like: torch.nested.nested_tensor_from_jagged(
                values.repeat_interleave(like.offsets().diff()), like.offsets()
            )
        ),
        ulysses_pad_and_slice_inputs=importlib.import_module("verl.utils.ulysses").ulysses_pad_and_slice_inputs,
    )
    tree = ast.parse((checkouts.verl() / "workers/engine/fsdp/transformer_impl.py").read_text())
    (owner,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "FSDPEngineWithLMHead"]
    owner.bases, owner.decorator_list = [], []
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and "temperature" in n.name]
    exec(compile(ast.Module([*functions, owner], []), "transformer_impl.py", "exec"), vars(module))
    engine = module.FSDPEngineWithLMHead()
    engine.pad_to_length, engine.use_ulysses_sp, engine.module = False, False, SimpleNamespace(config=None)
    engine.engine_config = SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False)
    engine.compute_entropy_from_logits = lambda logits: oracles.logits_logprobs(logits, logits[..., 0].long() * 0)[1]
    engine._get_packed_pad_size = lambda length: 0
    engine._gather_and_unpad_packed = lambda values, pad: values
    return engine


def topk_batch(**given):
    offsets = torch.tensor([0, 5, 14])
    jagged = partial(torch.nested.nested_tensor_from_jagged, offsets=offsets)
    listed = torch.randn(14, VOCAB).mul(3).log_softmax(-1).topk(LISTED)
    return Batch(
        input_ids=jagged(torch.randint(VOCAB, (14,))),
        position_ids=jagged(torch.cat([torch.arange(5), torch.arange(9)])),
        teacher_ids=jagged(listed.indices),
        teacher_logprobs=jagged(listed.values),
        temperature=0.7,
        distillation_use_topk=True,
        use_fused_kernels=True,
        **given,
    )


def test_the_loss_of_lists():
    """As `topk_divergence` has it, but for the clamp: of what lies under it, the student gets no gradient."""
    hidden, weight, _ = problem()
    teacher, ids = torch.randn(TOKENS, VOCAB).mul(3).log_softmax(-1).topk(LISTED)
    student = linear_cross_entropy(hidden, weight, ids)[0].detach().requires_grad_()
    found = forward_kl_topk(student, teacher, None)
    expected = topk_divergence(hidden, weight, ids, teacher, tail="none").divergence
    torch.testing.assert_close(found.distillation_losses, expected)
    torch.testing.assert_close(found.student_mass, student.exp().sum(-1))
    torch.testing.assert_close(found.teacher_mass, teacher.exp().sum(-1))
    clamped = forward_kl_topk(student, teacher, -4.0)
    (gradient,) = torch.autograd.grad(clamped.distillation_losses.sum(), student)
    under = student < -4
    assert under.any()
    assert not under.all()
    assert torch.equal(gradient == 0, under)
    assert torch.equal(clamped.student_mass, found.student_mass)
    low, high = student.clamp(min=-4), teacher.clamp(min=-4)
    torch.testing.assert_close(clamped.distillation_losses, (high.exp() * (high - low)).sum(-1))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("clamp", [None, -4.5])
@pytest.mark.parametrize("distillation_only", [False, True])
def test_verls_topk_distillation(verl, backend, clamp, distillation_only, monkeypatch):
    """Without logits what verl's engine and its loss make of logits; without the patch there is no loss."""
    engine = topk_engine(verl, monkeypatch)
    losses = importlib.import_module("verl.trainer.distillation.fsdp.losses")
    dense = importlib.import_module("verl.models.transformers.dense_common")
    model = small_model()
    model.lm_head.weight.data.mul_(4)
    batch = topk_batch(calculate_entropy=True, distillation_only=distillation_only)

    def from_logits(student_logits, data, distillation_config):
        lists = data["teacher_logprobs"], data["teacher_ids"]
        return losses.compute_forward_kl_topk(student_logits, *lists, distillation_config, "thd")

    settings = SimpleNamespace(log_prob_min_clamp=clamp)
    loss = partial(from_logits, distillation_config=SimpleNamespace(distillation_loss=settings))

    def step(forward):
        inputs, others = engine.prepare_model_inputs(batch)
        return engine.prepare_model_outputs(forward(**inputs), others, batch, loss)

    fused = partial(getattr(dense, f"forward_with_{backend}_backend"), model)
    patch_verl(distillation=True)
    mine = step(fused)
    batch["use_fused_kernels"] = False
    other = step(model)
    assert mine.keys() == other.keys() - {"overlap_count", "overlap_token_advantage"}
    grads = []
    for outputs in (mine, other):
        names = outputs.keys() & {"distillation_losses", "entropy", "log_probs"}
        total = sum((outputs[name].values() * torch.linspace(1, 2, 14)).sum() for name in names)
        grads.append(torch.autograd.grad(total, list(model.parameters())))
    for name, values in mine.items():
        assert values.offsets().equal(other[name].offsets())
        torch.testing.assert_close(values.values(), other[name].values().float(), rtol=1e-4, atol=1e-5)
    for gradient, truth in zip(*grads, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-3, atol=1e-4 * truth.abs().max().item())
    assert mine["distillation_losses"].values().detach().abs().min() > 0
    unpatch_verl()
    batch["use_fused_kernels"] = True
    with patched_verl():
        assert "distillation_losses" not in step(fused)


def test_a_teachers_lists_follow_the_sequence_parallel_labels(verl, monkeypatch):
    """Rank 1 of 2 has the second half of the tokens, padded to an even number."""
    engine, batch = topk_engine(verl, monkeypatch), topk_batch()
    engine.use_ulysses_sp, engine.ulysses_sequence_parallel_size = True, 2
    patch_verl(distillation=True)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    importlib.import_module("verl.utils.ulysses").set_ulysses_sequence_parallel_group(dist.group.WORLD)
    inputs, others = engine.prepare_model_inputs(batch)
    assert torch.equal(inputs["shift_labels"][0, :, 0], others["input_ids_rmpad_rolled"])
    assert torch.equal(inputs["shift_labels"][0, :, 1:], batch["teacher_ids"].values()[7:])


def test_topk_distillation_needs_packed_batches(verl, monkeypatch):
    engine = topk_engine(verl, monkeypatch)
    patch_verl(distillation=True)
    with pytest.raises(ValueError, match="use_remove_padding must be True"):
        engine.prepare_model_inputs(topk_batch(use_remove_padding=False))
