"""What a swapped model does not take, what is not swapped, and the arguments that go through."""

import functools
import inspect
import threading
from typing import TypedDict

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from hf_models import (
    BATCH,
    CONVENTIONS,
    HIDDEN,
    LENGTH,
    SIZES,
    VOCAB,
    build,
    fused_logps,
    make_batch,
    state_of,
    transformers,
)
from liger_rl import swap_lm_head
from liger_rl.models.swap import is_swapped, unswap_lm_head


def swapped(name: str = "Llama") -> transformers.PreTrainedModel:
    return swap_lm_head(build(name))


# --- calls ------------------------------------------------------------------------------------------------------------

IDS = torch.full((BATCH, LENGTH), 5)
BAD_CALLS = {
    "no labels": ({"labels": None}, ValueError, "got neither; transformers' Trainer .* label_smoothing_factor"),
    "two labels": ({"shift_labels": IDS}, ValueError, "labels or shift_labels must be given .* got both"),
    "some logits": ({"logits_to_keep": 1}, ValueError, "logits_to_keep has no meaning"),
    "ignore_index": ({"ignore_index": -1}, ValueError, "ignore_index must be -100 .*, got -1"),
    "a tuple": ({"return_dict": False}, ValueError, "return_dict"),
    "short": ({"labels": IDS[:, 1:]}, ValueError, r"\(3, 13\)"),
    "flat": ({"labels": IDS.flatten()}, ValueError, r"labels must be \(B, T\)"),
    "outside the vocabulary": ({"labels": VOCAB + 0 * IDS}, ValueError, rf"\[0, {VOCAB}\)"),
    "not integers": ({"labels": IDS.float()}, TypeError, "float32"),
    "not a tensor": ({"labels": IDS.tolist()}, TypeError, "labels must be a tensor, got list"),
    "no temperature": ({"temperature": 0.0}, ValueError, "temperature"),
}


@pytest.mark.parametrize(("changed", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_calls_are_refused_and_the_model_stays_usable(changed, error, message):
    model, batch = swapped(), make_batch()
    expected, expected_fused = model(**batch).logits, fused_logps(model, batch)
    with pytest.raises(error, match=message):
        model(**{**batch, **changed}, fused=True)
    handle = model.model.norm.register_forward_hook(lambda *_: {}["out of luck"])
    with pytest.raises(KeyError, match="out of luck"):  # nor does a failure inside of the model harm
        model(**batch, fused=True)
    handle.remove()
    assert torch.equal(model(**batch).logits, expected)
    assert torch.equal(fused_logps(model, batch), expected_fused)


MISSPELT = ["temprature", "mask", "extra", "entropies", "lables", "num_items", "chunk_token", "weight_gradient"]


@pytest.mark.parametrize("name", CONVENTIONS)
def test_an_argument_that_nothing_takes_is_refused(name):
    model, batch = swapped(name), make_batch()
    model.base_model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    for misspelt in MISSPELT:
        message = rf"{type(model).__name__} takes no {misspelt} with fused=True.* temperature, "
        with pytest.raises(TypeError, match=message):
            model(**batch, fused=True, **{misspelt: 1.0})


@pytest.mark.parametrize("name", ["fuse", "entropy", "temperature", "extras"])
def test_an_argument_of_the_fused_forward_alone_is_refused_without_fused(name):
    model, batch = swapped("Llama"), make_batch()
    model.base_model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(TypeError, match=f"{name} must not be given to LlamaForCausalLM without fused=True"):
        model(**batch, **{name: 1})


def test_arguments_of_the_model_go_through():
    """Those of its signature, of transformers' TypedDict, and those that only its body's forwards know."""
    model, batch = swapped("Mixtral"), make_batch()
    seen = []
    model.model.layers[1].self_attn.register_forward_pre_hook(lambda m, a, kw: seen.append(kw), with_kwargs=True)
    inputs = {
        "position_ids": torch.arange(LENGTH).expand(BATCH, -1),
        "cu_seq_lens_q": torch.tensor([0, LENGTH]),
        "max_length_q": LENGTH,
        "output_router_logits": False,
        "use_cache": False,
        "logits_to_keep": 0,
        "ignore_index": -100,
        "return_dict": True,
    }
    assert model(**batch, **inputs, fused=True).aux_loss is None
    assert seen[0]["cu_seq_lens_q"] is inputs["cu_seq_lens_q"]
    assert seen[0]["max_length_q"] == LENGTH


class _Options(TypedDict, total=False):
    typed: int


class _TypedBody(transformers.LlamaModel):
    """As code from the hub has it: some names read out of **kwargs, and annotations that nobody imports."""

    def forward(self, input_ids: "Ids" = None, **kwargs: Unpack[_Options]) -> "Output":  # noqa: F821
        options = dict(kwargs)
        self.seen = options.pop("quoted", None), options.pop(min(_Options.__optional_keys__), None)
        return super().forward(input_ids, **options)


class _RemoteLlama(transformers.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = _TypedBody(config)

    def forward(self, input_ids=None, **kwargs):
        kwargs.pop("of_the_head", None)
        return super().forward(input_ids, **kwargs)


def test_keywords_of_the_backbone_go_through():
    torch.manual_seed(0)
    model, batch = swap_lm_head(_RemoteLlama(transformers.LlamaConfig(**SIZES))), make_batch()
    assert model(**batch, quoted=5, fused=True).loss.isfinite()
    assert model.model.seen == (5, None)
    for name in ("temprature", "of_the_head"):  # the latter is read by the plain forward alone
        with pytest.raises(TypeError, match=f"_RemoteLlama takes no {name}"):
            model(**batch, **{name: 0.5}, fused=True)


# --- models -----------------------------------------------------------------------------------------------------------


class _Head(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, hidden):
        return self.linear(hidden)


class _ScaledLinear(nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


class _PlainLinear(nn.Linear):
    """Named differently, and nothing else."""


def _with_head(make) -> transformers.PreTrainedModel:
    model = build("Llama")
    model.lm_head = make(model.lm_head)
    return model


def _of_class(head_class: type, linear: nn.Linear) -> nn.Linear:
    head = head_class(HIDDEN, VOCAB, bias=False)
    head.weight = linear.weight
    return head


def _hooked(linear: nn.Linear) -> nn.Linear:
    linear.register_forward_hook(lambda head, args, output: output * 2)
    return linear


def _quantised(linear: nn.Linear) -> nn.Linear:
    forward = {"forward": lambda self, hidden: nn.functional.linear(hidden, self.weight.float())}
    head = type("Linear8bit", (nn.Linear,), forward)(HIDDEN, VOCAB, bias=False)
    head.weight = nn.Parameter(linear.weight.detach().to(torch.int8), requires_grad=False)
    return head


def _with_logits(name: str, change) -> transformers.PreTrainedModel:
    def forward(self, *args, **kwargs):
        output = transformers.LlamaForCausalLM.forward(self, *args, **kwargs)
        output.logits = change(output.logits)
        return output

    return type(name, (transformers.LlamaForCausalLM,), {"forward": forward})(transformers.LlamaConfig(**SIZES))


def _with_products(name: str, product) -> transformers.PreTrainedModel:
    def forward(self, input_ids=None, **kwargs):
        logits = product(self.lm_head, self.model(input_ids=input_ids).last_hidden_state)
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits)

    return type(name, (transformers.LlamaForCausalLM,), {"forward": forward})(transformers.LlamaConfig(**SIZES))


def _banned(logits: Tensor) -> Tensor:
    return logits.index_fill(-1, torch.tensor([3]), -1e4)


def _replaced(model: nn.Module) -> nn.Module:
    model.forward = functools.partial(model.forward)
    return model


def _offloaded(module: nn.Module) -> nn.Module:
    hooks = pytest.importorskip("accelerate.hooks", reason="offload is accelerate's")
    return hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu", offload=True))


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def _bert() -> nn.Module:
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, num_hidden_layers=1))


NO_MODEL = "must be a transformers PreTrainedModel"
NOT_SWAPPED = {
    "no linear": (lambda: _with_head(_Head), TypeError, r"head of LlamaForCausalLM must be an nn\.Linear, got _Head"),
    "its own forward": (
        lambda: _with_head(functools.partial(_of_class, _ScaledLinear)),
        ValueError,
        "Llama.*other log-probabilities than h @ W.T",
    ),
    "a hook": (lambda: _with_head(_hooked), ValueError, "LlamaForCausalLM.*other log-probabilities than h @ W.T"),
    "quantised": (
        lambda: _with_head(_quantised),
        TypeError,
        r"LlamaForCausalLM must be float32.*torch\.int8 in a Linear8bit",
    ),
    "squared": (lambda: _with_logits("Squared", lambda z: z**2), ValueError, "Squared has other log-prob"),
    "scaled": (lambda: _with_logits("Scaled", lambda z: z * 1.01), ValueError, "Scaled has other log-prob"),
    "capped": (lambda: _with_logits("Capped", lambda z: 30 * (z / 30).tanh()), ValueError, "Capped has other log-prob"),
    "a banned token": (lambda: _with_logits("Banned", _banned), ValueError, "Banned has other log-prob"),
    "not called": (
        lambda: _with_products("Headless", lambda head, h: nn.functional.linear(h, head.weight)),
        ValueError,
        "Headless must call its head once, it did 0 times",
    ),
    "called twice": (
        lambda: _with_products("TwiceHeaded", lambda head, h: head(h) + head(h.flip(0))),
        ValueError,
        "TwiceHeaded must call its head once, it did 2 times",
    ),
    "banned for good": (
        lambda: _with_logits("Minus", lambda z: z.index_fill(-1, torch.tensor([3]), -torch.inf)),
        ValueError,
        "Minus has logits that are not finite",
    ),
    "another input": (
        lambda: _with_products("Doubled", lambda head, h: head(2 * h)),
        ValueError,
        "head of Doubled gets other hidden states than those that its backbone returns",
    ),
    "offloaded": (lambda: _with_head(_offloaded), ValueError, "LlamaForCausalLM must be in memory, it is on meta"),
    # accelerate's mixed precision does that; it would hide the fused forward and swallow its arguments.
    "a forward of its own": (
        lambda: _replaced(build("Llama")),
        ValueError,
        "LlamaForCausalLM was replaced on the inst",
    ),
    "on meta": (_on_meta, ValueError, "LlamaForCausalLM must be in memory"),
    "without a head": (lambda: build("Llama").model, TypeError, "LlamaModel"),
    "not causal": (_bert, ValueError, "BertForMaskedLM is not"),
    "nothing": (lambda: None, TypeError, NO_MODEL),
    "a name": (lambda: "gpt2", TypeError, NO_MODEL),
    "a layer": (lambda: nn.Linear(2, 3), TypeError, NO_MODEL),
    "a class": (lambda: transformers.LlamaForCausalLM, TypeError, NO_MODEL),
}


@pytest.mark.parametrize(("made", "error", "message"), NOT_SWAPPED.values(), ids=NOT_SWAPPED)
def test_what_would_not_be_reproduced_is_left_as_it_was(made, error, message):
    model = made()
    causal = isinstance(model, transformers.LlamaForCausalLM) and model.device.type != "meta"
    expected = model(**make_batch()).logits if causal else None
    before = (type(model), state_of(model)) if isinstance(model, nn.Module) else None
    with pytest.raises(error, match=message):
        swap_lm_head(model)
    if isinstance(model, nn.Module):
        assert before == (type(model), state_of(model))
    if causal:
        assert torch.equal(model(**make_batch()).logits, expected)


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_on_the_gradient_of_a_head_are_not_left_out(kind):
    model, batch = build("Llama"), make_batch()
    handle = getattr(model.lm_head, kind)(lambda *_: None)
    swap_lm_head(model)
    with pytest.raises(ValueError, match="must be a plain Linear without hooks, found a Linear with 1 hooks"):
        model(**batch, fused=True)
    handle.remove()
    assert model(**batch, fused=True).loss.isfinite()


def test_a_swap_while_another_thread_runs_the_model():
    model, batch, found = build("Llama"), make_batch(), []
    expected = model(**batch).logits

    def run_elsewhere(*_):
        handle.remove()
        thread = threading.Thread(target=lambda: found.append(model(**batch).logits))
        thread.start()
        thread.join()

    handle = model.model.layers[0].register_forward_hook(run_elsewhere)
    swap_lm_head(model)
    assert torch.equal(found[0], expected)


def test_a_swap_that_fails_leaves_the_model_as_it_was():
    """Whatever the error is, such as one of memory."""
    model, batch = build("Llama"), make_batch()
    expected, before = model(**batch).logits, (type(model), state_of(model))

    def run_out(*_):
        raise torch.OutOfMemoryError

    handle = model.model.register_forward_hook(run_out)
    with pytest.raises(torch.OutOfMemoryError):
        swap_lm_head(model)
    handle.remove()
    assert before == (type(model), state_of(model))
    assert torch.equal(model(**batch).logits, expected)
    assert is_swapped(swap_lm_head(model))


def test_other_terms_of_a_models_loss_do_not_hide_that_it_shifts_labels():
    def forward(self, *args, **kwargs):
        output = transformers.LlamaForCausalLM.forward(self, *args, **kwargs)
        if output.loss is not None:
            output.loss = output.loss + 0.5 * output.logits.logsumexp(-1).square().mean()
        return output

    kind = type("WithZLoss", (transformers.LlamaForCausalLM,), {"forward": forward})
    for seed in range(4):
        torch.manual_seed(seed)
        model = swap_lm_head(kind(transformers.LlamaConfig(**SIZES)))
        assert model(**make_batch(), fused=True).loss is not None


def _doubled(linear: nn.Linear) -> nn.Module:
    hooks = pytest.importorskip("accelerate.hooks", reason="the hook is accelerate's")
    kind = type("Doubling", (hooks.ModelHook,), {"post_forward": lambda self, module, output: 2 * output})
    return hooks.add_hook_to_module(linear, kind())


CHANGED = "head of LlamaForCausalLM must be a plain Linear"
CHANGED_LATER = {
    "another head": (functools.partial(_of_class, _ScaledLinear), CHANGED),
    "a hook": (_hooked, CHANGED),
    "offloaded": (_offloaded, "keep the head in memory"),
    "accelerate's hook": (_doubled, "forward of a Linear in the head of LlamaForCausalLM was replaced"),
}


@pytest.mark.parametrize(("change", "message"), CHANGED_LATER.values(), ids=CHANGED_LATER)
def test_a_head_changed_after_the_swap_is_refused(change, message):
    """What an adapter or a hook adds would silently be left out of the log-probabilities."""
    model = swap_lm_head(build("Llama"))
    model.lm_head = change(model.lm_head)
    with pytest.raises(ValueError, match=message):
        model(**make_batch(), fused=True)


def test_a_linear_head_of_another_name_is_accepted():
    model, batch = _with_head(functools.partial(_of_class, _PlainLinear)), make_batch()
    assert torch.equal(fused_logps(swap_lm_head(model), batch), fused_logps(swapped(), batch))


@pytest.mark.parametrize("change", ["a subclass", "a forward of its own"])
def test_what_came_after_the_swap_has_to_be_undone_first(change):
    model = swapped()
    swapped_class = type(model)
    if change == "a subclass":
        model.__class__ = type("Derived", (swapped_class,), {})
    else:
        _replaced(model)
    with pytest.raises(ValueError, match=r"Derived was derived from the swapped class|replaced after the swap"):
        unswap_lm_head(model)
    vars(model).pop("forward", None)
    model.__class__ = swapped_class
    assert type(unswap_lm_head(model)) is transformers.LlamaForCausalLM


def test_a_forward_of_its_own_class_on_the_instance_is_no_hindrance():
    """Removing accelerate's hooks leaves one behind."""
    model, batch = build("Llama"), make_batch()
    model.forward = model.forward
    assert torch.equal(fused_logps(swap_lm_head(model), batch), fused_logps(swapped(), batch))
    assert "fused" not in inspect.signature(unswap_lm_head(model).forward).parameters
    assert not is_swapped(model)
    assert model(**batch).logits.shape == (BATCH, LENGTH, VOCAB)
