"""The breadth of HuggingFace models: every architecture, both attentions, images, experts, devices, packed rows.

Small random float32 models; the fused call against the full logits of the same forward, to float32 rounding.
"""

import pytest
import torch
from torch import Tensor, nn

import oracles
from hf_models import (
    BATCH,
    BEFORE_5,
    CONFIGS,
    HEADS,
    HIDDEN,
    HYBRIDS,
    SIZES,
    VOCAB,
    assert_same_as_full_logits,
    build,
    from_logits,
    full,
    fused_logps,
    gradients,
    make_batch,
    make_config,
    randomised,
    transformers,
)
from liger_rl import swap_lm_head
from liger_rl.models.swap import FusedCausalLMOutput, is_swapped, unswap_lm_head

IMAGE = 5
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
ROUTED = ("Mixtral", "Qwen3Moe", "Olmoe", "GptOss")
MROPE = {**SIZES, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}

on_both_attentions = pytest.mark.parametrize("attention", ["eager", "sdpa"])


def image_text_model(name: str, attention: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    if name == "Llava":
        vision = transformers.CLIPVisionConfig(**VISION, projection_dim=32)
        options = {"text_config": transformers.LlamaConfig(**SIZES), "image_token_index": IMAGE}
    elif name == "PaliGemma":
        vision = transformers.SiglipVisionConfig(**VISION)
        options = {"text_config": transformers.GemmaConfig(**HEADS), "image_token_index": IMAGE, "projection_dim": 32}
    elif name == "SmolVLM":
        vision = transformers.SmolVLMVisionConfig(**VISION)
        options = {"text_config": transformers.LlamaConfig(**SIZES), "image_token_id": IMAGE, "scale_factor": 1}
    elif name == "Gemma3":
        vision = transformers.SiglipVisionConfig(**VISION)
        text = transformers.Gemma3TextConfig(**HEADS)
        options = {"text_config": text, "mm_tokens_per_image": 4, "image_token_index": IMAGE}
    else:
        vision = {"depth": 1, "num_heads": 4, "hidden_size": 32, "patch_size": 14, "spatial_merge_size": 2}
        vision |= {"embed_dim": 32} if name == "Qwen2VL" else {"intermediate_size": 48, "out_hidden_size": 32}
        options = {"image_token_id": IMAGE, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
        options["text_config"] = MROPE
        if name == "Qwen3_5":
            vision |= {"num_position_embeddings": 16}
            options["text_config"] = HYBRIDS["Qwen3_5Text"]
        if name == "Qwen3VL":
            vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
            options["text_config"] = {**HEADS, "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    config = make_config(name, vision_config=vision, **options)
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    return randomised(model_class._from_config(config, attn_implementation=attention)).eval()


def make_image_batch(name: str) -> dict[str, Tensor]:
    """Each row begins with an image of four tokens."""
    batch, generator = make_batch(), torch.Generator().manual_seed(2)
    if name.startswith("Qwen"):  # four 14 x 14 patches in two frames, merged to one token
        pixels = torch.randn(BATCH * 4, 3 * 2 * 14 * 14, generator=generator)
        batch |= {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, 2]] * BATCH)}
        batch["input_ids"][:, :3] = torch.tensor([7, IMAGE, 8])
        if not BEFORE_5:
            batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
    else:
        batch["pixel_values"] = torch.randn(BATCH, 3, 28, 28, generator=generator)
        batch["input_ids"][:, :4] = IMAGE
    batch["labels"][:, :5] = -100
    return batch


# --- architectures ----------------------------------------------------------------------------------------------------


@on_both_attentions
@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture(name, attention, device):
    model, batch = build(name, device, attention), make_batch(device)
    if name == "RecurrentGemma" and BEFORE_5:  # a forward without a cache fails after one of another number of rows
        swap_lm_head(model)
    fused = assert_same_as_full_logits(model, batch)
    assert (fused.aux_loss is not None) == (name in ROUTED)


@on_both_attentions
@pytest.mark.parametrize("name", ["Llava", "Gemma3", "Qwen2VL", "Qwen2_5_VL"])
def test_vision_language_models(name, attention):
    model, batch = image_text_model(name, attention), make_image_batch(name)
    with_image = assert_same_as_full_logits(model, batch).per_token_logps
    assert any("vis" in n for n in gradients(model, model(**batch, fused=True).loss))
    other = {**batch, "pixel_values": batch["pixel_values"] + 1.0}
    assert (fused_logps(model, other) - with_image).abs().max() > 1e-3, "the image has no effect"
    text = {n: v.clamp(min=9) if n == "input_ids" else v for n, v in make_batch().items()}
    torch.testing.assert_close(model(**text, fused=True).loss, model(**text).loss)


DECODER = {
    "vocab_size": VOCAB, "d_model": HIDDEN, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "max_position_embeddings": 64, "dropout": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
XLM = {"vocab_size": VOCAB, "n_words": VOCAB, "emb_dim": HIDDEN, "n_layers": 1, "n_heads": 4, "pad_token_id": 0}
UNSHIFTED = {
    **dict.fromkeys(("Bart", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall", "Marian", "MBart", "Mvp"), DECODER),
    **dict.fromkeys(("Pegasus", "PLBart", "TrOCR", "Whisper"), DECODER),
    "XLM": {**XLM, "causal": True},
}


@pytest.mark.parametrize("name", UNSHIFTED)
def test_a_class_that_does_not_shift_its_labels(name):
    """Its loss of the labels is that of the fused call's shift_labels. The fused call's labels have no such loss."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**UNSHIFTED[name])
    model = randomised(transformers.AutoModelForCausalLM.from_config(config)).eval()
    ids = torch.randint(9, VOCAB, (BATCH, 9))
    plain = model(input_ids=ids, labels=ids)
    fused = swap_lm_head(model)(input_ids=ids, labels=ids, fused=True)
    assert fused.loss is None
    torch.testing.assert_close(fused.per_token_logps, from_logits(plain.logits, ids)[0], rtol=1e-5, atol=1e-5)
    unshifted = model(input_ids=ids, shift_labels=ids, fused=True)
    torch.testing.assert_close(unshifted.loss, plain.loss, rtol=1e-5, atol=1e-5)


# --- several devices --------------------------------------------------------------------------------------------------


def dispatched(model: nn.Module) -> nn.Module:
    """As `device_map` leaves a model: a hook in front of every module, all on the one device of this test."""
    accelerate = pytest.importorskip("accelerate", reason="device_map is accelerate's")
    names = ("embed_tokens", "norm", "rotary_emb", "layers.0", "layers.1")
    devices = dict.fromkeys((*(f"model.{name}" for name in names), "lm_head"), "cpu")
    return accelerate.dispatch_model(model, device_map=devices, main_device="cpu", force_hooks=True)


@pytest.mark.parametrize("order", ["dispatched first", "swapped first"])
def test_a_model_behind_accelerates_hooks(order):
    from accelerate.hooks import remove_hook_from_module

    batch = make_batch()
    expected = swap_lm_head(build("Llama"))(**batch, fused=True)
    model = build("Llama")
    before = type(model)
    model = swap_lm_head(dispatched(model)) if order == "dispatched first" else dispatched(swap_lm_head(model))
    assert "forward" in vars(model)
    assert "forward" in vars(model.lm_head)
    moved = []
    hook, plain_pre_forward = model._hf_hook, model._hf_hook.pre_forward
    hook.pre_forward = lambda module, *args, **kwargs: (moved.append(1), plain_pre_forward(module, *args, **kwargs))[1]
    fused = model(**batch, fused=True)
    assert moved == [1]
    assert isinstance(fused, FusedCausalLMOutput)
    assert torch.equal(fused.per_token_logps, expected.per_token_logps)
    assert_same_as_full_logits(model, batch)
    assert "forward" in vars(model.lm_head), "the head's own hook is back in its place"
    unswap_lm_head(model)
    assert type(model) is before
    assert not hasattr(model(**batch), "per_token_logps")
    assert torch.equal(swap_lm_head(model)(**batch, fused=True).per_token_logps, expected.per_token_logps)
    remove_hook_from_module(model, recurse=True)
    assert torch.equal(model(**batch, fused=True).per_token_logps, expected.per_token_logps)
    assert not is_swapped(unswap_lm_head(model))
    assert isinstance(model(**batch), transformers.modeling_outputs.CausalLMOutputWithPast)


def test_outputs_come_back_to_the_inputs_device():
    """accelerate's outermost hook rebuilds the output from its fields."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model, batch = swap_lm_head(build("Mixtral")), make_batch()
    expected = model(**batch, fused=True)
    add_hook_to_module(model, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    output = model(**batch, fused=True)
    assert isinstance(output, FusedCausalLMOutput)
    assert output.keys() == expected.keys()
    assert torch.equal(output.loss, expected.loss)


def test_accelerates_mixed_precision_after_the_swap():
    """Before it, the swap is refused: the forward on the instance would hide the fused one."""
    accelerate = pytest.importorskip("accelerate", reason="mixed precision is accelerate's")
    accelerator, batch = accelerate.Accelerator(mixed_precision="bf16", cpu=True), make_batch()
    exact, _ = full(build("Llama"), batch)
    model = accelerator.prepare(swap_lm_head(build("Llama")))
    plain, _ = full(model, batch)
    fused = model(**batch, fused=True)
    assert fused.loss.dtype == torch.float32
    error = oracles.norm_error(fused.per_token_logps, exact)
    assert 0 < error <= oracles.norm_budget(plain, exact, torch.bfloat16)
    with pytest.raises(ValueError, match="replaced after the swap"):
        unswap_lm_head(model)
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    torch.testing.assert_close(bare(**batch, fused=True).per_token_logps, exact, rtol=1e-5, atol=1e-5)
    assert not is_swapped(unswap_lm_head(bare))
    with pytest.raises(ValueError, match="replaced on the instance"):
        swap_lm_head(accelerator.prepare(build("Llama")))


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("body", "head"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_head_of_another_dtype_runs_under_autocast_as_the_models_own(body, head):
    """Without autocast neither does: the model's own head refuses to multiply two dtypes."""
    batch = make_batch()
    exact, _ = full(build("Llama").bfloat16().float(), batch)
    model = build("Llama").bfloat16().to(getattr(torch, body))
    model.lm_head.to(getattr(torch, head))
    with pytest.raises(RuntimeError, match="dtype"):
        model(**batch)
    swap_lm_head(model)
    with pytest.raises(TypeError, match=rf"weight must be torch\.{body} from hidden \(or run under autocast\)"):
        model(**batch, fused=True)
    with torch.autocast("cpu", torch.bfloat16):
        plain, fused = full(model, batch)[0], model(**batch, fused=True)
    error = oracles.norm_error(fused.per_token_logps, exact)
    assert error <= oracles.norm_budget(plain, exact, torch.bfloat16)
    assert gradients(model, fused.loss)["lm_head.weight"].dtype == getattr(torch, head)
