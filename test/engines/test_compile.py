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
from head_calls import CALLS, Batch, batch, functional, problem
from liger_rl import PRESETS, FusedLinearGRPOLoss, LogitTransform, LowRank, linear_logprobs
from liger_rl.kernels.statistics import EXTRAS

VOCAB = 129


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


def compiled(function: Callable, backend: Any = "aot_eager", **options: Any) -> Callable:
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def solve(
    x: Batch, name: str, compiler: Callable = lambda function: function, function: Callable | None = None,
    *, calls: int = 1, **options,
) -> list[Tensor | None]:  # fmt: skip
    """Results of a call of the table, and the gradients of its inputs: the same in each of `calls` calls."""
    call, tensors = CALLS[name], x._asdict()

    def of_leaves(*leaves: Tensor) -> list[Tensor]:
        # A NamedTuple as an argument is more than torch 2.8 traces.
        given = Batch(**{**tensors, **dict(zip(call.inputs, leaves, strict=True))})
        return [values for values in (function or call.function)(given, **options) if values is not None]

    leaves, solution = [tensors[name].detach().requires_grad_() for name in call.inputs], compiler(of_leaves)
    results = []
    for _ in range(calls):
        outputs = solution(*leaves)
        total = functional(*(values for values in outputs if values.requires_grad))
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
        results.append([*(values.detach() for values in outputs), *grads])
        assert_same(results[-1], results[0])
    return results[0]


def assert_same(found: list[Tensor | None], expected: list[Tensor | None], *, rounded: bool = False) -> None:
    torch.testing.assert_close(found, expected, **({} if rounded else {"rtol": 0.0, "atol": 0.0}))


IN_A_GRAPH: list[tuple[str, dict[str, Any]]] = [
    ("dense", {"extras": EXTRAS}),
    ("dense", {"lse": True, "entropy": False}),
    ("dense", {"transform": LogitTransform(temperature=0.7, softcap=4.0, scale=1.5)}),
    ("dense", {"grad_tolerance": 0.2}),
    ("dense", {"compute_dtype": torch.bfloat16}),
    ("several targets", {"extras": ("mean_logits",)}),
    *((name, options) for name in ("dense", "label smoothing", "low rank", "several targets", "a teacher's lists")
      for options in ({}, {"chunk_tokens": 4, "chunk_vocab": 32}, {"fixed_shape": True})),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options"), IN_A_GRAPH, ids=[" ".join([name, *options]) for name, options in IN_A_GRAPH]
)
def test_one_graph_with_the_numbers_of_eager_mode(name, options, device):
    x = batch(device=device)
    garbage = {"hidden": x.hidden.masked_fill(~x.mask[..., None], math.nan)}
    x = x._replace(**garbage, targets=x.targets.masked_fill(~x.mask, VOCAB))
    expected, found = solve(x, name, **options), solve(x, name, compiled, calls=2, **options)
    # Entries of a tolerance's lists may be sorted in another order. A graph does not gather a low-rank term's rows.
    assert_same(found, expected, rounded="grad_tolerance" in options or name == "low rank")
    assert all(values is None or values.isfinite().all() for values in found)


def test_two_terms_of_a_graph_one_with_hidden_states_of_its_own(device):
    def adapted(x: Batch, **options):
        terms = [LowRank(a=x.a, b=x.b, scaling=0.5), LowRank(a=x.a, b=x.b, hidden=x.hidden * 2)]
        return linear_logprobs(x.hidden, x.weight, x.targets, mask=x.mask, bias=x.bias, low_rank=terms, **options)

    x = batch(device=device)
    for options in ({}, {"fixed_shape": True}):
        found = solve(x, "low rank", compiled, adapted, **options)
        assert_same(found, solve(x, "low rank", function=adapted, **options), rounded=True)


@pytest.mark.parametrize("name", ["dense", "several targets"])
def test_under_autocast(name, device):
    x = batch(device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert_same(solve(x, name, compiled), solve(x, name))


@pytest.mark.compilation
def test_inductor(device):
    """A real compiler fuses the operations around the operator, so rounding may differ."""
    x = batch(device=device)

    def step(x: Batch):
        return CALLS["dense"].function(x._replace(hidden=x.hidden * 2))

    found = solve(x, "dense", lambda function: compiled(function, "inductor"), step)
    assert_same(found, solve(x, "dense", function=step), rounded=True)


@pytest.mark.parametrize("name", PRESETS)
def test_losses(name):
    x = batch()
    # At a ratio of 1 the lottery of `clip_cov` has no blanks.
    options = {"dr_grpo": {"max_completion_length": 7}, "dro": {"dro_beta": 0.3}, "clip_cov": {"clip_cov_ratio": 1.0}}
    options = options.get(name, {})
    old = torch.full(x.mask.shape, -4.0)

    def step(passes: str) -> Callable[[Batch], list[Tensor]]:
        loss = FusedLinearGRPOLoss(name, beta=0.1, metrics="basic", passes=passes, **options)

        def run(x: Batch) -> list[Tensor]:
            columns = {"old_per_token_logps": old, "ref_per_token_logps": old}
            result = loss(x.hidden, x.weight, x.targets, x.advantages[:, 0], x.mask, **columns)
            return [result.loss, *(metric.total.detach().float() for metric in result.metrics.values())]

        return run

    graphs = Graphs()
    found = solve(x, "dense", lambda function: compiled(function, graphs), step("auto"))
    assert_same(found, solve(x, "dense", function=step("two")))  # a graph takes two passes, whatever eager mode takes
    assert graphs.names().count("liger_rl.linear_logprobs") == 1
    assert not {"matmul", "mm", "addmm", "linear"} & {name.split(".")[-1] for name in graphs.names()}


def test_any_number_of_tokens_takes_one_graph():
    x, graphs = problem((4, 40)), Graphs()

    def head(hidden, weight, targets):
        return linear_logprobs(hidden, weight, targets, entropy=True)

    in_a_graph = compiled(head, graphs, dynamic=True)
    for tokens in (40, 11, 23):
        given = x.hidden[:, :tokens].clone(), x.weight, x.targets[:, :tokens].clone()
        assert torch.equal(in_a_graph(*given).logps, head(*given).logps)
    assert len(graphs.graphs) == 1


def test_a_target_outside_the_vocabulary_raises_when_it_runs():
    x = problem()
    head = compiled(lambda targets: linear_logprobs(x.hidden, x.weight, targets).logps)
    assert head(x.targets).isfinite().all()
    with pytest.raises(ValueError, match="targets must be token ids in"):
        head(torch.full_like(x.targets, VOCAB))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_inputs_get_no_gradient(frozen):
    x = problem().leaves([frozen])
    head = compiled(lambda hidden, weight: linear_logprobs(hidden, weight, x.targets).logps.sum())
    head(x.hidden, x.weight).backward()
    assert [name for name, grad in x.grads().items() if grad is None] == [frozen]


def test_a_backward_twice_of_results_that_were_written_to():
    x = problem().leaves()
    value = compiled(lambda hidden: linear_logprobs(hidden, x.weight, x.targets).logps, Graphs())(x.hidden)
    total = value.mul_(1.0).sum()
    first, second = (torch.autograd.grad(total, x.hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


BROKEN_OUT: list[tuple[str, str, Callable[[Batch], dict]]] = [
    *((name, "a support", lambda _: {}) for name in ("support", "support with empty rows")),
    *((name, "linear_divergence", lambda _: {}) for name in ("forward KL", "reverse KL", "JSD", "JSD in one pass")),
    ("given logits", "logits_logprobs", lambda _: {}),
    ("policy of given logits", "grpo_loss_from_logits", lambda _: {}),
    ("dense", "a weight_grad", lambda x: {"weight_grad": torch.zeros_like(x.weight)}),
    ("dense", "topk", lambda _: {"topk": 3}),
    ("dense", "gather", lambda _: {"gather": lambda *_: nullcontext()}),
]


# Of each public function one: to trace around a break takes seconds, and a function breaks in one place.
WITH_NUMBERS = (
    "support with empty rows",
    "JSD in one pass",
    "given logits",
    "policy of given logits",
)


@pytest.mark.parametrize(("name", "feature", "options"), BROKEN_OUT, ids=[" ".join(row[:2]) for row in BROKEN_OUT])
def test_calls_that_no_graph_holds(name, feature, options):
    """The graph breaks there, with the results of eager mode. fullgraph=True raises, and names the feature."""
    x, graphs = batch(), Graphs()
    part = CALLS[name].inputs[0]

    def function(x: Batch) -> list[Tensor]:
        # Not by `_replace`: after a graph break torch 2.11 makes such a NamedTuple with a value too few.
        doubled = Batch(**{field: value * 2 if field == part else value for field, value in x._asdict().items()})
        found = CALLS[name].function(doubled, **options(x))
        return [value * 1 for value in found if value is not None]  # a graph can hold the products on both sides

    if name in WITH_NUMBERS:
        broken = solve(x, name, lambda given: torch.compile(given, backend=graphs), function)
        assert_same(broken, solve(x, name, function=function))
        assert any("mul" in name for name in graphs.names())
        assert not [name for name in graphs.names() if "liger_rl" in name]
        torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=rf"{feature} does not run under torch\.compile"):
        solve(x, name, compiled, function)


def calls_of_operators(*, fixed: bool) -> list[tuple[Any, tuple, dict]]:
    """Our operators in the graphs of forward and backward, and what they are called with."""
    x, calls = batch(), []

    class Calls(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            if getattr(target, "namespace", None) == "liger_rl":
                calls.append((target, *tree_map_only(Tensor, Tensor.detach, (args, kwargs))))
            return super().call_function(target, args, kwargs)

    def both(x: Batch):
        options = {"extras": ("is_top1",), "grad_tolerance": 0.0 if fixed else 0.1}
        plain = CALLS["dense"].function(x, fixed_shape=fixed, **options)[:2]
        return *plain, CALLS["low rank"].function(x, fixed_shape=fixed, entropy=False)[0]

    def run(graph, inputs):
        return make_boxed_func(Calls(graph).run)

    solve(x, "low rank", lambda function: compiled(function, aot_autograd(fw_compiler=run)), both)
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


def step_of(call, model, **inputs) -> list[Tensor]:
    """Values and gradients of a fused call of a model."""
    model.zero_grad()
    out = call(**inputs, entropy=True, fused=True)
    (out.loss + out.entropy.sum()).backward()
    grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return [*(values.detach() for values in (out.loss, out.per_token_logps, out.entropy)), *grads]


def test_a_swapped_model(device):
    transformers = pytest.importorskip("transformers", reason="the model is HuggingFace's")
    from liger_rl.integrations.transformers import swap_lm_head

    config = transformers.Gemma2Config(
        vocab_size=160, hidden_size=32, num_hidden_layers=1, intermediate_size=32, head_dim=16, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    model = swap_lm_head(transformers.Gemma2ForCausalLM(config).to(device))
    ids = torch.randint(160, (2, 9), device=device)
    labels = ids.masked_fill(torch.arange(9, device=device) < 3, -100)
    before = {name: type(value) for name, value in vars(model.lm_head).items()}
    in_a_graph = compiled(model)
    inputs = {"input_ids": ids, "labels": labels, "temperature": 0.8}
    eager, first, second = (step_of(call, model, **inputs) for call in (model, in_a_graph, in_a_graph))
    assert_same(second, first)
    # The fused head changes no number, but old compilers round some of the body's otherwise.
    assert_same(first, eager, rounded=True)
    # The head answers for itself again.
    assert model(input_ids=ids).logits.shape == (2, 9, 160)
    assert {name: type(value) for name, value in vars(model.lm_head).items()} == before
    seen = []
    for register in (model.lm_head.register_forward_hook, model.lm_head.register_forward_pre_hook):
        register(lambda *_: seen.append(1), prepend=True)
    model(input_ids=ids)
    assert len(seen) == 2
