"""torch.compile: the head is one operator of the graph, with the numbers of eager mode."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._pytree import tree_map_only

from devices import NEEDS_GPU
from head_calls import problem
from liger_rl import (
    PRESETS,
    FusedLinearGRPOLoss,
    LogitTransform,
    LogProbs,
    LowRank,
    Support,
    grpo_loss_from_logits,
    linear_divergence,
    linear_logprobs,
    logits_logprobs,
    topk_divergence,
)

VOCAB, HIDDEN, SHAPE = 133, 16, (3, 7)
LEAVES = ("hidden", "weight", "bias", "a", "b")
Tensors = dict[str, Tensor]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that keeps what it was given and runs it as it is, its backward too."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs) -> Callable:
        self.graphs.append(graph)
        return graph.forward

    def names(self) -> list[str]:
        return [str(node.target) for graph in self.graphs for node in graph.graph.nodes if node.op == "call_function"]


def tensors(device="cpu", shape=SHAPE) -> Tensors:
    x = problem(shape, HIDDEN, VOCAB, torch.float32, device, bias=True, rank=2)
    x.targets.view(-1)[1] = -100
    return {**x.leaves().floats(), "targets": x.targets, "mask": (torch.rand(shape) < 0.6).to(device)}


def compiled(function: Callable, backend: Any = "aot_eager", **options: Any) -> Callable:
    """In one graph, of plain tensors: a NamedTuple as an argument is more than torch 2.8 traces."""
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def total(outputs) -> Tensor:
    value = 0.0
    for place, values in enumerate(outputs):
        steps = torch.arange(values.numel(), device=values.device).view(values.shape)
        value = value + (values * torch.cos(steps + place)).sum()
    return value


def solve(function: Callable[[Tensors], Any], x: Tensors, compiler: Callable | None = None) -> list[Tensor | None]:
    """What the function returns, and the gradients of LEAVES."""

    def of_leaves(*leaves: Tensor) -> list[Tensor]:
        return [values for values in function({**x, **dict(zip(LEAVES, leaves, strict=True))}) if values is not None]

    leaves = [x[name] for name in LEAVES]
    outputs = (of_leaves if compiler is None else compiler(of_leaves))(*leaves)
    differentiable = [values for values in outputs if values.requires_grad]
    grads = torch.autograd.grad(total(differentiable), leaves, allow_unused=True)
    return [*(values.detach() for values in outputs), *grads]


def assert_same(found: list[Tensor | None], expected: list[Tensor | None], *, rounded: bool = False) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            tolerance = {} if rounded else {"rtol": 0.0, "atol": 0.0}
            torch.testing.assert_close(mine, other, **tolerance)


def plain(x: Tensors, **options: Any) -> LogProbs:
    return linear_logprobs(x["hidden"], x["weight"], x["targets"], mask=x["mask"], **options)


def several(x: Tensors, **options: Any) -> LogProbs:
    ids = torch.stack([x["targets"], x["targets"].flip(0) - 20, x["targets"], x["targets"].flip(1)], dim=-1)
    return linear_logprobs(x["hidden"], x["weight"], ids, mask=x["mask"], entropy=True, lse=True, **options)


def low_rank(x: Tensors, **options: Any) -> LogProbs:
    terms = [LowRank(a=x["a"], b=x["b"], scaling=0.5), LowRank(a=x["a"], b=x["b"], hidden=x["hidden"] * 2)]
    return plain(x, low_rank=terms, **options)


def from_lists(x: Tensors) -> tuple[Tensor]:
    ids = torch.arange(5, device=x["hidden"].device).expand(*SHAPE, 5)
    teacher = torch.log_softmax(ids * 1.0, -1)
    return (topk_divergence(x["hidden"], x["weight"], ids, teacher, mask=x["mask"]).divergence,)


def under_autocast(x: Tensors) -> LogProbs:
    with torch.autocast(x["hidden"].device.type, dtype=torch.bfloat16):
        return plain(x, entropy=True)


def over_garbage(x: Tensors) -> LogProbs:
    hidden = x["hidden"].masked_fill(~x["mask"][..., None], math.nan)
    return plain({**x, "hidden": hidden, "targets": x["targets"].masked_fill(~x["mask"], VOCAB)}, entropy=True)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "entropy and extras": {"entropy": True, "extras": ("is_top1", "log_sum_sq_probs", "mean_logits")},
    "lse": {"lse": True, "entropy": True},
    "transform": {"transform": LogitTransform(temperature=0.7, softcap=4.0, scale=1.5)},
    "chunks": {"chunk_tokens": 4, "chunk_vocab": 32},
    "fixed shape": {"fixed_shape": True, "entropy": True},
    "batch invariant": {"batch_invariant": True, "entropy": True},
    "tolerance": {"grad_tolerance": 0.2, "entropy": True},
    "compute dtype": {"compute_dtype": torch.bfloat16},
}
CALLS: dict[str, Callable[[Tensors], Any]] = {
    **{name: lambda x, options=options: plain(x, bias=x["bias"], **options) for name, options in OPTIONS.items()},
    "several targets": several,
    "several targets, fixed shape": lambda x: several(x, fixed_shape=True),
    "low rank": low_rank,
    "low rank, fixed shape": lambda x: low_rank(x, fixed_shape=True),
    "distillation from lists": from_lists,
    "autocast": under_autocast,
    "garbage under the mask": over_garbage,
}
# Entries of a tolerance's lists may be sorted in another order. A graph does not gather the rows of a low-rank term.
ROUNDED = ("tolerance", "low rank", "low rank, fixed shape")


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_with_the_numbers_of_eager_mode(name, device):
    x = tensors(device)
    expected, first, second = (solve(CALLS[name], x, compiler) for compiler in (None, compiled, compiled))
    assert_same(second, first)
    assert_same(first, expected, rounded=name in ROUNDED)
    assert all(values is None or values.isfinite().all() for values in first)


def test_inductor(device):
    """A real compiler fuses the operations around the operator, so rounding may differ."""
    x = tensors(device)

    def step(x: Tensors) -> LogProbs:
        return plain({**x, "hidden": x["hidden"] * 2}, entropy=True)

    assert_same(solve(step, x, lambda function: compiled(function, "inductor")), solve(step, x), rounded=True)


@pytest.mark.parametrize("why", ["a named chunk", "a low-rank term", "no epilogue"])
def test_a_backward_without_bounds_is_exact(why, device):
    """Without statistics of tiles the backward leaves nothing out, as in eager mode."""
    x = tensors(device, shape=(600,))
    weights = torch.where(torch.arange(600, device=device) % 10 == 0, 1.0, 1e-6)

    def solved(x: Tensors, tolerance: float) -> tuple[Tensor]:
        terms = [LowRank(a=x["a"], b=x["b"])] if why == "a low-rank term" else []
        chunk = 64 if why == "a named chunk" else None
        return (plain(x, low_rank=terms, grad_tolerance=tolerance, chunk_vocab=chunk).logps * weights,)

    tolerant, exact = (solve(lambda x, t=t: solved(x, t), x, compiled) for t in (0.2, 0.0))
    assert_same(tolerant, exact)


@pytest.mark.parametrize("name", PRESETS)
def test_losses(name):
    x = tensors()
    options = {"dr_grpo": {"max_completion_length": 7}, "dro": {"dro_beta": 0.3}}.get(name, {})
    advantages, old = torch.tensor([1.0, -0.5, 0.3]), torch.full(SHAPE, -4.0)

    def step(passes: str) -> Callable[[Tensors], list[Tensor]]:
        loss = FusedLinearGRPOLoss(name, beta=0.1, metrics="basic", passes=passes, **options)

        def run(x: Tensors) -> list[Tensor]:
            columns = {"old_per_token_logps": old, "ref_per_token_logps": old}
            result = loss(x["hidden"], x["weight"], x["targets"], advantages, x["mask"], **columns)
            return [result.loss, *(metric.total.detach().float() for metric in result.metrics.values())]

        return run

    graphs = Graphs()
    # A graph takes two passes, whatever eager mode takes.
    assert_same(solve(step("auto"), x, lambda function: compiled(function, graphs)), solve(step("two"), x))
    assert graphs.names().count("liger_rl.linear_logprobs") == 1
    assert not {"matmul", "mm", "addmm", "linear"} & {name.split(".")[-1] for name in graphs.names()}


def test_any_number_of_tokens_takes_one_graph():
    x, graphs = tensors(shape=(4, 40)), Graphs()

    def head(hidden, weight, targets):
        return linear_logprobs(hidden, weight, targets, entropy=True)

    in_a_graph = compiled(head, graphs, dynamic=True)
    for tokens in (40, 11, 23):
        batch = x["hidden"][:, :tokens].clone(), x["weight"], x["targets"][:, :tokens].clone()
        assert torch.equal(in_a_graph(*batch).logps, head(*batch).logps)
    assert len(graphs.graphs) == 1


def test_a_target_outside_the_vocabulary_raises_when_it_runs():
    x = tensors()
    head = compiled(lambda targets: linear_logprobs(x["hidden"], x["weight"], targets).logps)
    assert head(x["targets"]).isfinite().all()
    with pytest.raises(ValueError, match="targets must be token ids in"):
        head(x["targets"].masked_fill(x["mask"], VOCAB))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_inputs_get_no_gradient(frozen):
    x = tensors()
    x[frozen].requires_grad_(False)
    compiled(lambda hidden, weight: plain({**x, "hidden": hidden, "weight": weight}).logps.sum())(
        x["hidden"], x["weight"]
    ).backward()
    assert [name for name in LEAVES if x[name].grad is not None] == ["weight" if frozen == "hidden" else "hidden"]


def test_backward_twice_and_not_through_itself():
    """As in eager mode: the same gradients again, and none of the gradients. Results may be written to."""
    x = tensors()
    head = compiled(lambda hidden: plain({**x, "hidden": hidden}).logps, Graphs())
    value = head(x["hidden"]).mul_(1.0).sum()
    first, second = (torch.autograd.grad(value, x["hidden"], retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    (grad,) = torch.autograd.grad(head(x["hidden"]).square().sum(), x["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        grad.square().sum().backward()


BROKEN_OUT: dict[str, Callable[[Tensors], Any]] = {
    "a support": lambda x: plain(x, support=Support.from_padded(x["targets"].clamp(min=0)[..., None]), entropy=True),
    "a weight_grad": lambda x: plain(x, weight_grad=torch.zeros_like(x["weight"])),
    "topk": lambda x: plain(x, topk=3),
    "gather": lambda x: plain(x, gather=lambda *_: nullcontext()),
    "a temperature for each token": lambda x: plain(x, transform=LogitTransform(temperature=torch.full(SHAPE, 0.7))),
    "logits_logprobs": lambda x: logits_logprobs(
        x["hidden"] @ x["weight"].T, x["targets"], mask=x["mask"], entropy=True
    ),
    "grpo_loss_from_logits": lambda x: grpo_loss_from_logits(
        x["hidden"] @ x["weight"].T,
        x["targets"],
        torch.ones(SHAPE[0]),
        x["mask"],
        old_per_token_logps=torch.zeros(SHAPE),
    ),
    "linear_divergence": lambda x: linear_divergence(
        x["hidden"], x["weight"], x["hidden"].detach() * 2, x["weight"].detach(), kind="jsd"
    ),
}


@pytest.mark.parametrize("feature", BROKEN_OUT)
def test_what_a_graph_does_not_hold(feature):
    """The graph breaks there, with the results of eager mode. fullgraph=True raises, and names the feature."""
    x = tensors()

    def function(x: Tensors) -> list[Tensor]:
        # A graph can hold the products on both sides.
        found = BROKEN_OUT[feature]({**x, "hidden": x["hidden"] * 2})
        return [value * 1 for value in found if value is not None]

    graphs = Graphs()
    assert_same(solve(function, x, lambda given: torch.compile(given, backend=graphs)), solve(function, x))
    assert any("mul" in name for name in graphs.names())
    assert not [name for name in graphs.names() if "liger_rl" in name]
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=rf"{feature} does not run under torch\.compile"):
        solve(function, x, compiled)


def calls_of_operators(*, fixed: bool) -> list[tuple[Any, tuple, dict]]:
    """Our operators in the graphs of forward and backward, and what they are called with."""
    x, calls = tensors(), []

    class Calls(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            if getattr(target, "namespace", None) == "liger_rl":
                calls.append((target, *tree_map_only(Tensor, Tensor.detach, (args, kwargs))))
            return super().call_function(target, args, kwargs)

    def head(hidden, weight, bias, a, b):
        given = {"mask": x["mask"], "fixed_shape": fixed}
        options = {"bias": bias, "entropy": True, "extras": ("is_top1",), "grad_tolerance": 0.0 if fixed else 0.1}
        values = linear_logprobs(hidden, weight, x["targets"], **options, **given)
        adapted = linear_logprobs(hidden, weight, x["targets"], low_rank=[LowRank(a=a, b=b)], **given)
        return (values.logps + values.entropy).sum() + adapted.logps.sum()

    def run(graph, inputs):
        return make_boxed_func(Calls(graph).run)

    leaves = [x[name] for name in LEAVES]
    compiled(head, aot_autograd(fw_compiler=run))(*leaves).backward()
    return calls


CHECKED = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")


@pytest.mark.parametrize("fixed", [False, True], ids=["default", "fixed shape"])
def test_operators_keep_torchs_rules(fixed):
    """The operators that wait for the device say so by their tag. The others do not: CUDA graphs are to hold them."""
    calls = calls_of_operators(fixed=fixed)
    name = "liger_rl::linear_logprobs" + "_fixed_shape" * fixed
    assert [target._schema.name for target, *_ in calls] == [name] * 2 + [f"{name}_backward"] * 2
    for target, args, kwargs in calls:
        torch.library.opcheck(target, args, kwargs, test_utils=CHECKED)
        if hasattr(torch.Tag, "cudagraph_unsafe"):  # torch 2.8 has no such tag
            assert (torch.Tag.cudagraph_unsafe in target.tags) != fixed


@NEEDS_GPU
@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="torch 2.8 has no such tag")
@pytest.mark.parametrize("tokens", [700, 64], ids=["epilogue", "tiles"])
@pytest.mark.parametrize("fixed", [False, True], ids=["default", "fixed shape"])
@pytest.mark.parametrize("kind", ["linear", "low rank"])
def test_cuda_graphs_of_the_compiler(kind, fixed, tokens):
    """What waits for the device stays outside of them, and the rest is captured with the numbers of eager mode."""
    x = problem((tokens,), 64, 512, torch.bfloat16, "cuda", rank=4).leaves()
    leaves = x.hidden, x.weight, x.a, x.b
    mask = torch.rand(tokens).cuda() < 0.6

    def step(hidden, weight, a, b):
        given = {"mask": mask, "entropy": True, "fixed_shape": fixed}
        terms = [LowRank(a=a, b=b)] if kind == "low rank" else []
        found = linear_logprobs(hidden * 2, weight, x.targets, low_rank=terms, **given)
        return (found.logps * 3).sum() + found.entropy.square().sum()

    def solved(function) -> list[Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        value = function(*leaves)
        found = torch.autograd.grad(value, leaves, allow_unused=True)
        return [value.detach().clone(), *(grad.clone() for grad in found if grad is not None)]

    in_graphs, expected = torch.compile(step, mode="reduce-overhead", fullgraph=True), solved(step)
    for _ in range(4):  # one to warm up, one to capture, two of replays
        found = solved(in_graphs)
        assert len(found) == len(expected)
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=0.05, atol=0.05 * other.abs().max().item())


def model_of(family="Qwen3", **options):
    transformers = pytest.importorskip("transformers", reason="the model is HuggingFace's")
    torch.manual_seed(0)
    sizes = {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "head_dim": 16}
    config = getattr(transformers, f"{family}Config")(**sizes, num_attention_heads=2, num_key_value_heads=1, **options)
    return getattr(transformers, f"{family}ForCausalLM")(config)


@pytest.mark.parametrize("family", ["Qwen3", "Gemma2"])
def test_a_swapped_model(family, device):
    from liger_rl.integrations.transformers import swap_lm_head

    model = swap_lm_head(model_of(family).to(device))
    ids = torch.randint(160, (2, 9), device=device)
    labels = ids.masked_fill(torch.arange(9, device=device) < 3, -100)
    before = {name: type(value) for name, value in vars(model.lm_head).items()}
    in_a_graph = compiled(model)
    results = []
    for call in (model, in_a_graph, in_a_graph):
        model.zero_grad()
        out = call(input_ids=ids, labels=labels, fused=True, entropy=True, temperature=0.8)
        (out.loss + out.entropy.sum()).backward()
        grads = [parameter.grad.clone() for parameter in model.parameters()]
        results.append([out.loss.detach(), out.per_token_logps.detach(), out.entropy.detach(), *grads])
    assert_same(results[2], results[1])
    # The fused head changes no number, but old compilers round some of the body's otherwise.
    same_body = torch.equal(in_a_graph(input_ids=ids).logits, model(input_ids=ids).logits)
    assert_same(results[1], results[0], rounded=not same_body)
    # The head answers for itself again.
    assert model(input_ids=ids).logits.shape == (2, 9, 160)
    assert {name: type(value) for name, value in vars(model.lm_head).items()} == before
    seen = []
    for register in (model.lm_head.register_forward_hook, model.lm_head.register_forward_pre_hook):
        register(lambda *_: seen.append(1), prepend=True)
    model(input_ids=ids)
    assert len(seen) == 2


def test_a_swapped_model_whose_body_breaks_the_graph():
    from liger_rl.integrations.transformers import swap_lm_head

    model = swap_lm_head(model_of())
    model.model.layers[0].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    ids = torch.randint(160, (2, 9))
    expected = model(input_ids=ids, labels=ids, fused=True).loss
    broken = torch.compile(model, backend="aot_eager")
    assert torch.equal(broken(input_ids=ids, labels=ids, fused=True).loss, expected)
    assert "forward" not in vars(model.lm_head)


def test_a_swapped_model_with_lora_on_its_head():
    peft = pytest.importorskip("peft", reason="the adapters are PEFT's")
    from liger_rl.integrations.transformers import swap_lm_head

    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"], init_lora_weights=False)
    model = swap_lm_head(peft.get_peft_model(model_of(tie_word_embeddings=False), config))
    ids = torch.randint(160, (2, 9))
    in_a_graph = compiled(model)
    results = []
    for call in (model, in_a_graph):
        model.zero_grad()
        loss = call(input_ids=ids, labels=ids, fused=True).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert_same(*results, rounded=True)
