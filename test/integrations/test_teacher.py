"""`TeacherHead`: read from a model, written and read again, and its divergence against the model's own logits."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import oracles
from hf_models import VOCAB, build, make_batch, state_of
from liger_rl import FusedLinearGRPOLoss, LogitTransform, ReferenceHead, linear_divergence
from liger_rl.integrations.teacher import TeacherHead
from liger_rl.integrations.transformers import is_swapped, swap_lm_head

HIDDEN = 24  # of the student


def teacher_head(**changes) -> TeacherHead:
    torch.manual_seed(0)
    transform = LogitTransform(temperature=0.7, softcap=30.0, scale=1 / 3)
    return replace(TeacherHead(torch.randn(37, 8, dtype=torch.bfloat16), torch.randn(37), transform), **changes)


def student(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(*make_batch()["input_ids"].shape, HIDDEN, generator=generator, dtype=dtype)
    weight = 0.3 * torch.randn(VOCAB, HIDDEN, generator=generator, dtype=dtype)
    return hidden.requires_grad_(), weight.requires_grad_()


# --- a file -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [True, False])
def test_a_file_holds_every_bit(tmp_path, dtype, biased):
    wide = torch.randn(8, 37).to(dtype)
    saved = teacher_head(weight=wide.T, **({} if biased else {"bias": None}))  # not contiguous
    saved.save(tmp_path / "head.safetensors")
    loaded = TeacherHead.load(tmp_path / "head.safetensors")
    assert loaded.weight.dtype == dtype
    assert torch.equal(loaded.weight, saved.weight)
    assert (loaded.bias is None) if not biased else torch.equal(loaded.bias, saved.bias)
    assert loaded.transform == saved.transform
    TeacherHead(torch.zeros(37, 8)).save(tmp_path / "head.safetensors")  # while the first file's tensors are in use
    assert torch.equal(loaded.weight, saved.weight)
    again = TeacherHead.load(str(tmp_path / "head.safetensors"), device="cpu")
    assert again.transform == LogitTransform()
    assert not again.weight.any()


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("no tensors")
    save_file({"weight": torch.zeros(3, 2)}, tmp_path / "plain", {"format": "pt"})
    save_file({"weight": torch.zeros(3, 2)}, tmp_path / "bare")
    for name in ("text", "plain", "bare"):
        with pytest.raises(ValueError, match=f"path must be a file that TeacherHead.save wrote, got .*{name}"):
            TeacherHead.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        TeacherHead.load(tmp_path / "nowhere")


class Packed(torch.Tensor):
    """Stands for a quantised weight that says it is float32."""


BAD_HEADS = {
    "weight": ({"weight": torch.zeros(37)}, ValueError, r"weight must be \(V, H'\), got \(37,\)"),
    "bias": ({"bias": torch.zeros(36)}, ValueError, r"bias must be \(V,\) = \(37,\) from weight, got \(36,\)"),
    "dtype": ({"weight": torch.zeros(37, 8, dtype=torch.int8)}, TypeError, "weight must be float32, .* got torch.int8"),
    "quantised": ({"weight": torch.zeros(37, 8).as_subclass(Packed)}, ValueError, "nor quantised, got a Packed"),
    "no transform": ({"transform": 0.7}, TypeError, "transform must be a LogitTransform"),
    "temperatures": ({"transform": LogitTransform(temperature=torch.ones(5))}, ValueError, "temperature .* a number"),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "message"), BAD_HEADS.values(), ids=BAD_HEADS)
def test_bad_heads_are_refused(changed, error, message):
    with pytest.raises(error, match=message):
        teacher_head(**changed)


def test_a_sharded_head_is_refused(lone_rank):
    from torch.distributed.tensor import Shard, distribute_tensor

    with pytest.raises(ValueError, match="weight must be plain, neither sharded nor quantised, got a DTensor"):
        TeacherHead(distribute_tensor(torch.zeros(37, 8), lone_rank, [Shard(0)]))


# --- a model ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Gemma2", "Granite", "Phi"])  # a softcap, a scale, a bias
def test_the_divergence_is_that_of_the_models_logits(name, tmp_path):
    model, batch = build(name, num_hidden_layers=1).requires_grad_(False), make_batch()
    TeacherHead.of(model).save(tmp_path / "head")
    teacher = TeacherHead.load(tmp_path / "head")
    inputs, mask = {key: batch[key] for key in ("input_ids", "attention_mask")}, batch["labels"] >= 0
    teacher_hidden = model.get_decoder()(**inputs).last_hidden_state
    hidden, weight = student()
    found = linear_divergence(hidden, weight, teacher_hidden, kind="reverse_kl", mask=mask, **teacher.head).divergence
    found.sum().backward()

    log_q = model.double()(**inputs).logits.log_softmax(-1)
    leaves = [part.detach().double().requires_grad_() for part in (hidden, weight)]
    expected = oracles.divergence((leaves[0] @ leaves[1].T).log_softmax(-1), log_q, "reverse_kl")
    expected = torch.where(mask, expected, 0.0)
    expected.sum().backward()
    assert expected.sum() > mask.sum()  # nats, far from equal
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip((hidden, weight), leaves, strict=True):
        assert oracles.norm_error(mine.grad, theirs.grad) < 1e-5


def test_a_model_is_read_without_a_copy_and_left_as_it_was():
    model = build("Gemma2")
    before = state_of(model)
    teacher = TeacherHead.of(model)
    assert state_of(model) == before
    assert teacher.weight.data_ptr() == model.lm_head.weight.data_ptr()
    assert not teacher.weight.requires_grad
    assert teacher.transform == LogitTransform(softcap=3.0)
    assert TeacherHead.of(swap_lm_head(model)).transform == teacher.transform
    assert is_swapped(model)


def test_models_that_one_weight_does_not_describe_are_refused():
    peft = pytest.importorskip("peft", reason="adapters need it")
    lora = peft.get_peft_model(build("Llama"), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="must have no adapters"):
        TeacherHead.of(lora)
    assert not is_swapped(lora)
    merged = lora.merge_and_unload()
    assert torch.equal(TeacherHead.of(merged).weight, merged.lm_head.weight)
    hooked = build("Llama")
    hooked.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="without hooks"):
        TeacherHead.of(hooked)
    assert not is_swapped(hooked)
    with pytest.raises(TypeError, match="must be a transformers PreTrainedModel"):
        TeacherHead.of(torch.nn.Linear(3, 2))


def test_it_is_a_reference_of_a_policy_loss():
    """The mean of the exact KL, with advantages of 0."""
    teacher, mask = TeacherHead.of(build("Gemma2")), make_batch()["labels"] >= 0
    hidden, weight = student()
    reference_hidden = torch.randn(*mask.shape, teacher.weight.shape[1])
    reference = ReferenceHead(hidden=reference_hidden, **vars(teacher))
    loss = FusedLinearGRPOLoss("dapo", beta=1.0, kl_estimator="exact")
    ids, advantages = torch.zeros(mask.shape, dtype=torch.long), torch.zeros(len(mask))
    found = loss(hidden, weight, ids, advantages, mask, reference=reference).loss
    divergence = linear_divergence(hidden, weight, reference_hidden, kind="reverse_kl", mask=mask, **teacher.head)
    torch.testing.assert_close(found, divergence.divergence.sum() / mask.sum())
