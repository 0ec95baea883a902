"""Trials of models: those that let sequences share a row pass, whatever their rounding; others fail with a reason."""

import copy
import warnings
from functools import cache

import pytest
import torch
from torch import nn

from hf_models import NEEDS_TREES_OF_GPT2, build
from liger_rl import FusedLinearGRPOLoss, loss_step, loss_steps, swap_lm_head
from step_calls import sharing

LOSS = FusedLinearGRPOLoss("dapo")
DEEP = {"num_hidden_layers": 24}
# bfloat16's rounding over 24 layers of random weights is up to 0.6 of what another context changes.
MODELS = {
    "Llama": DEEP,
    "Qwen3": DEEP,
    "Mistral": DEEP | {"sliding_window": 6},
    "Gemma2": DEEP | {"sliding_window": 4},
    "GPT2": {"n_layer": 24},
    "Mixtral": DEEP | {"output_router_logits": False},
}
GPT2 = pytest.param("GPT2", marks=NEEDS_TREES_OF_GPT2)


def batch_of(length=26, vocab=50):
    """Four sequences that begin with 18 common tokens."""
    ids = torch.randint(3, vocab, (4, length), generator=torch.Generator().manual_seed(1))
    ids[:, :18] = ids[0, :18]
    mask = torch.arange(length).expand(4, length) >= 18
    advantages = torch.tensor([1.0, -0.5, 2.0, 0.3])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mask": mask, "advantages": advantages}


@torch.no_grad()
def layout_of(model, **options):
    return loss_steps(model, batch_of(), LOSS, **options).layout


@cache
def make_once(name, seed):
    torch.manual_seed(seed)
    # In training mode a hook alone would keep the batch as it is.
    return swap_lm_head(build(name, **MODELS[name]).to(torch.bfloat16)).eval()


def make(name, seed=0):
    """A copy, because to build 24 layers and to prove their head takes as long as a trial."""
    return copy.deepcopy(make_once(name, seed))


@pytest.mark.parametrize("name", [*(name for name in MODELS if name != "GPT2"), GPT2])
def test_deep_models_in_bfloat16_have_trees(name):
    for seed in range(2):
        assert "in trees of shared prefixes" in layout_of(make(name, seed))


def get_layers(model):
    body = model.base_model
    return body.h if hasattr(body, "h") else body.layers


def leak_state(scale):
    """Each token of a layer has a share of the one before it in the row."""

    def change(model):
        def add_token_before(layer, args):
            before = nn.functional.pad(args[0][:, :-1], (0, 0, 1, 0))
            return (args[0] + scale * before, *args[1:])

        get_layers(model)[12].register_forward_pre_hook(add_token_before)

    return change


def change_inputs(function):
    def change(model):
        def of_a_tree(body, args, inputs):
            mask = inputs.get("attention_mask")
            if isinstance(mask, dict) or (mask is not None and mask.dim() == 4):
                inputs = inputs | function(inputs)
            return args, inputs

        model.base_model.register_forward_pre_hook(of_a_tree, with_kwargs=True)

    return change


def map_masks(mask, function):
    if isinstance(mask, dict):
        return {name: map_masks(value, function) for name, value in mask.items()}
    return function(mask)


def hide_shared_tokens(mask):
    place = torch.arange(mask.shape[-1])
    hidden = (place[:, None] >= 36) & (place >= 8) & (place < 28)  # another sequence has the first eight places
    if mask.dtype == torch.bool:
        return mask & ~hidden
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)  # of eager attention


def without_mask(inputs):
    return {"attention_mask": map_masks(inputs["attention_mask"], lambda mask: torch.ones_like(mask).tril())}


def read_first_token(model):
    get_layers(model)[12].register_forward_pre_hook(lambda layer, args: (args[0] + args[0][:, :1], *args[1:]))


SEES_ANOTHER = "lets a sequence see another one of its row"
BLIND = "does not let a sequence see the tokens that it shares"
WRONG = {
    "a state": (leak_state(0.1), SEES_ANOTHER),
    "little of a state": (leak_state(0.001), SEES_ANOTHER),
    "no mask": (change_inputs(without_mask), SEES_ANOTHER),
    "the first token of the row": (read_first_token, "gives log-probabilities in a tree that are not those of"),
    "another mask": (
        change_inputs(lambda inputs: {"attention_mask": map_masks(inputs["attention_mask"], hide_shared_tokens)}), BLIND
    ),
    "columns": (
        change_inputs(lambda inputs: {"position_ids": torch.arange(inputs["position_ids"].shape[1])[None]}),
        "does not read position_ids",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["Llama", "Gemma2", GPT2, "Mixtral"])
@pytest.mark.parametrize(("change", "reason"), WRONG.values(), ids=WRONG)
def test_deep_models_in_bfloat16_without_trees(name, change, reason):
    for seed in range(2):
        model = make(name, seed)
        change(model)
        assert f"{type(model).__name__} {reason}" in layout_of(model)


def test_layers_that_own_their_experts():
    """What their attention gives is compared, too."""
    model = make("Llama")
    for layer in get_layers(model):
        layer.experts = nn.Identity()
    leak_state(0.001)(model)
    assert f"{type(model).__name__} {SEES_ANOTHER}" in layout_of(model)


def test_learned_columns_beside_the_positions():
    model = swap_lm_head(build("Llama")).eval()
    table = torch.randn(64, model.config.hidden_size)
    model.get_input_embeddings().register_forward_hook(lambda _, args, output: output + table[: output.shape[1]])
    assert "gives log-probabilities in a tree that are not those of separate rows" in layout_of(model)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Mistral", {"sliding_window": 2}),
        ("Llama", {"max_position_embeddings": 26}),
        pytest.param("GPT2", {"n_positions": 26}, marks=NEEDS_TREES_OF_GPT2),
    ],
)
def test_small_windows_and_few_positions(name, options):
    model = build(name, **options)
    assert "in trees of shared prefixes" in layout_of(model)
    trees = loss_step(model, batch_of(), LOSS)
    with sharing(False):
        rows = loss_step(model, batch_of(), LOSS)
    torch.testing.assert_close(trees.per_token_logps, rows.per_token_logps, rtol=1e-5, atol=1e-5)


def test_fewer_positions_than_a_trial_takes():
    short = {name: x[:, :18] if x.dim() == 2 else x for name, x in batch_of().items()}
    short["mask"] = torch.arange(18).expand(4, 18) == 17
    layout = loss_steps(build("Llama", max_position_embeddings=18), short, LOSS).layout
    assert "a trial takes 19 positions, the model has 18" in layout


# --- the model is left as it was --------------------------------------------------------------------------------------


class PackedLinear(nn.Linear):
    """Stores its weight in another way at its first forward in evaluation, as some quantized layers do."""

    def forward(self, x):
        if not self.training:
            self.weight.data = self.weight.data.flip(0)
        return super().forward(x)


class OwnLinear(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight)


def test_a_head_of_a_class_of_ones_own():
    """The fused head reads its weight, so that no trial puts hooks on it."""
    models = [build("Llama").train() for _ in range(2)]
    models[1].lm_head.__class__ = OwnLinear
    plain, own = (loss_step(swap_lm_head(model), batch_of(), LOSS) for model in models)
    assert torch.equal(plain.per_token_logps, own.per_token_logps)
    assert plain.layout == own.layout


def test_no_layer_sees_evaluation():
    model = swap_lm_head(build("Llama")).train()
    for layer in get_layers(model):
        layer.mlp.up_proj.__class__ = PackedLinear
    before = {name: x.clone() for name, x in model.state_dict().items()}
    loss_step(model, batch_of(), LOSS).loss.backward()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_dropout_is_off_in_a_trial_and_on_after_it():
    peft = pytest.importorskip("peft", reason="of a base model's dropout there are no trees")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.4, init_lora_weights=False)
    model = peft.get_peft_model(swap_lm_head(build("Llama")), config).train()
    state = torch.get_rng_state()
    assert "in trees" in loss_steps(model, batch_of(), LOSS).layout  # not if the trial fails
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.4}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_do_not_warn_in_a_trial(reentrant):
    model = swap_lm_head(build("Llama")).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "in trees" in loss_steps(model, batch_of(), LOSS).layout
    assert all(layer.gradient_checkpointing for layer in get_layers(model))
