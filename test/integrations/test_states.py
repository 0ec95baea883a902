"""Layers with a state in a tree's row: each run begins with what its parent ended with.

That whole models give what their padded rows give, with every preset and padding: test_fuzz_steps.py.
"""

import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason="the functions are those of its layers")

from test_prefix_trees import grow_sequences

from devices import NEEDS_GPU, on_gpu
from hf_models import BEFORE_5, CONFIGS, build
from liger_rl import FusedLinearGRPOLoss, loss_step, swap_lm_head
from liger_rl.step import attention, prefix_tree, states, step
from liger_rl.step.states import DELTA_RULES, GATED, RUNS, Runs, StateLayers
from step_calls import sharing

WIDTH = 3
needs_functions = pytest.mark.skipif(BEFORE_5, reason="transformers 4.57 has other functions")


def make_tree(depth: int, longest: int = 40) -> tuple[list[Tensor], prefix_tree.PrefixTree]:
    """Sequences that branch `depth` times, of runs of one token and more, and their tree."""
    sequences = [torch.tensor(run) for run in (*grow_sequences(depth, longest), [3], *grow_sequences(depth, 18))]
    known = prefix_tree.sort_sequences(sequences, [0] * len(sequences))
    return sequences, prefix_tree.build_prefix_tree([len(tokens) for tokens in sequences], known, multiple=4)


def take_row(tree: prefix_tree.PrefixTree, sequences: list[Tensor], table: Tensor) -> Tensor:
    """(1, n, width) a row of `table`, (ids, offsets, width), for the token of each place."""
    pairs = zip(tree.sequences.tolist(), tree.offsets.tolist(), strict=True)
    return torch.stack([table[sequences[s][offset], offset] for s, offset in pairs])[None]


def list_places(tree: prefix_tree.PrefixTree, sequence: int) -> list[int]:
    """A place for each token of a sequence, found by walking back from its last place."""
    places, before = [int(tree.places[sequence][-1])], tree.before.tolist()
    while before[places[0]] >= 0:
        places.insert(0, before[places[0]])
    return places


@pytest.mark.parametrize("takes_lengths", [False, True], ids=["padded", "lengths"])
@pytest.mark.parametrize("depth", range(4))
def test_a_recurrence_reads_each_sequence_alone(depth, takes_lengths):
    """Of the kind h <- (1 - b) h + b x, whose state no zero changes."""
    calls = []

    def scan(x: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for t in range(x.shape[1]):
            state = (1 - b[:, t]) * state + b[:, t] * x[:, t]
            outputs.append(state)
        return torch.stack(outputs, 1), state

    def run(columns, initial, has_final, lengths):
        calls.append((columns["x"].shape, initial is None, has_final))
        x, b = columns["x"], columns["b"]
        if lengths is None:
            output, final = scan(x, b, torch.zeros_like(x[:, 0]) if initial is None else initial)
            return output, final if has_final else None
        assert torch.equal(*lengths)
        sizes = lengths[0].diff().tolist()
        states = [None] * len(sizes) if initial is None else initial
        parts = zip(x.split(sizes, 1), b.split(sizes, 1), states, strict=True)
        results = [scan(u, v, torch.zeros_like(u[:, 0]) if h is None else h[None]) for u, v, h in parts]
        outputs, finals = zip(*results, strict=True)
        return torch.cat(outputs, 1), torch.cat(finals) if has_final else None

    for _ in range(3):
        calls.clear()
        sequences, tree = make_tree(depth)
        table = torch.rand(6, 300, 2 * WIDTH, dtype=torch.float64)
        x, b = take_row(tree, sequences, table).split(WIDTH, 2)
        runs = Runs(tree, StateLayers((), 1, takes_lengths), torch.device("cpu"))
        row = runs.scan(run, {"x": x, "b": b})
        for number, tokens in enumerate(sequences):
            own = table[tokens, torch.arange(len(tokens))][None]
            expected, _ = scan(*own.split(WIDTH, 2), torch.zeros(1, WIDTH, dtype=torch.float64))
            places = list_places(tree, number)
            torch.testing.assert_close(row[:, places], expected, rtol=1e-12, atol=1e-12)
        if takes_lengths:  # one call for each depth
            assert [has_final for _, _, has_final in calls] == [True] * (len(calls) - 1) + [False]
            assert sum(shape[1] for shape, *_ in calls) == tree.tokens
        assert [is_first for _, is_first, _ in calls] == sorted((is_first for _, is_first, _ in calls), reverse=True)


@needs_functions
@pytest.mark.parametrize("depth", range(4))
@pytest.mark.parametrize("decay", [0.02, 5.0])
def test_the_gated_delta_rule_reads_each_sequence_alone(decay, depth):
    """In chunks of the tree, which branch within a chunk, at its end and after several; values and gradients.

    From transformers 5.24 on several heads of values may share a query and a key. Earlier references get them repeated.
    """
    home = sys.modules[type(build("Qwen3_5Text")).__module__]
    states.restore_states()
    reference = vars(home)[GATED]
    sequences, tree = make_tree(depth, longest=150)
    heads, shared, wide = 4, 1 + depth % 2, (8, 8, 12)
    table = torch.randn(6, 600, heads * (sum(wide) + 2))
    row = take_row(tree, sequences, table)
    *vectors, g, beta = row.unflatten(2, (heads, -1)).split([*wide, 1, 1], 3)
    columns = [*vectors, -decay * g[..., 0].sigmoid(), beta[..., 0].sigmoid()]
    columns = [*(x[:, :, ::shared] for x in columns[:2]), *columns[2:]]
    columns = [x.detach().requires_grad_() for x in columns]
    runs = Runs(tree, StateLayers((), 1, False, True), torch.device("cpu"))

    def run(x: list[Tensor], **options: Any) -> Tensor:
        rule = states._wrap_delta_rule(reference, states.NAMES[GATED])
        if not options:
            x = [*(one.repeat_interleave(shared, 2) for one in x[:2]), *x[2:]]
        return rule(*x[:3], g=x[3], beta=x[4], use_qk_l2norm_in_kernel=True, **options)[0]

    places = [list_places(tree, number) for number in range(len(sequences))]
    joint = run(columns, **{RUNS: runs})
    found = [joint[:, at] for at in places]
    expected = [run([x[:, at] for x in columns]) for at in places]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    upstream = [torch.randn_like(x) for x in found]
    gradients = [torch.autograd.grad(outputs, columns, upstream) for outputs in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@needs_functions
def test_autocast_rounds_no_more_than_in_the_reference():
    """Its products, and never the state."""
    home = sys.modules[type(build("Qwen3_5Text")).__module__]
    states.restore_states()
    rule = states._wrap_delta_rule(vars(home)[GATED], states.NAMES[GATED])
    tokens = 1200
    tree = prefix_tree.build_prefix_tree([tokens], prefix_tree.sort_sequences([torch.zeros(tokens)], [0]))
    columns = torch.randn(5, 1, tokens, 2, 32, generator=torch.Generator().manual_seed(1))
    columns = [*columns[:3], -0.02 * columns[3, ..., 0].sigmoid(), columns[4, ..., 0].sigmoid()]

    def run(is_rounded: bool, **options: Any) -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in columns]
        with torch.autocast("cpu", torch.bfloat16, enabled=is_rounded):
            output, _ = rule(*inputs[:3], g=inputs[3], beta=inputs[4], use_qk_l2norm_in_kernel=True, **options)
        upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
        return [output.detach(), *torch.autograd.grad(output.float(), inputs, upstream)]

    exact, theirs = run(False), run(True)
    ours = run(True, **{RUNS: Runs(tree, StateLayers((), 1, False, True), torch.device("cpu"))})
    for x, y, z in zip(ours, theirs, exact, strict=True):
        assert (x - z).norm() < 1.05 * (y - z).norm()


@pytest.mark.parametrize("taps", [2, 3, 5])
@pytest.mark.parametrize("widest", [5, 7])
def test_a_convolution_reads_each_sequence_alone(taps, widest):
    weight, bias = torch.rand(WIDTH, taps, dtype=torch.float64), torch.rand(WIDTH, dtype=torch.float64)

    def convolve(x: Tensor) -> Tensor:
        y = nn.functional.conv1d(x, weight[:, None], bias, padding=taps - 1, groups=WIDTH)
        return nn.functional.silu(y[..., : x.shape[2]])

    for depth in range(4):
        sequences, tree = make_tree(depth)
        table = torch.rand(6, 300, WIDTH, dtype=torch.float64)
        row = take_row(tree, sequences, table).transpose(1, 2)
        runs = Runs(tree, StateLayers((), widest, False), torch.device("cpu"))
        mended = runs.mend_convolution(convolve(row), row, weight, bias, "silu")
        for number, tokens in enumerate(sequences):
            own = table[tokens, torch.arange(len(tokens))].T[None]
            places = list_places(tree, number)
            torch.testing.assert_close(mended[..., places], convolve(own), rtol=1e-12, atol=1e-12)


def test_long_runs_are_cut_and_short_ones_padded():
    """Of sequences up to 2,000 tokens. Pieces of one length run together, and no call is for one short run alone."""
    lengths = torch.randint(1, 2000, (64,), generator=torch.Generator().manual_seed(3)).tolist()
    sequences = [torch.full((length,), number) for number, length in enumerate(lengths)]
    known = prefix_tree.sort_sequences(sequences, [0] * len(sequences))
    tree = prefix_tree.build_prefix_tree(lengths, known)
    runs = Runs(tree, StateLayers((), 4, False), torch.device("cpu"))
    counts = [call.runs for calls in runs.calls for call in calls]
    widths = [size // count for size, count in zip(runs._sizes, counts, strict=True)]
    assert max(widths) == states.LONGEST_RUN
    assert runs._order.numel() < 1.2 * tree.tokens
    assert len(runs.calls) == -(-max(lengths) // states.LONGEST_RUN)
    assert len(widths) < 3 * len(runs.calls)


class Operations(TorchDispatchMode):
    """Lists the names of what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("takes_lengths", [False, True], ids=["padded", "lengths"])
def test_a_scan_makes_no_whole_tensor_for_each_call(takes_lengths):
    _, tree = make_tree(3)
    runs = Runs(tree, StateLayers((), 1, takes_lengths), torch.device("cpu"))
    x = torch.rand(1, tree.tokens, WIDTH, requires_grad=True)

    def double(columns, initial, has_final, lengths):
        return columns["x"] * 2, x.new_zeros(columns["x"].shape[0] if lengths is None else tree.tokens, 1)

    with Operations() as done:
        row = runs.scan(double, {"x": x})
        assert ("zeros_like" in done.names) == (not takes_lengths)
        done.names.clear()
        (gradient,) = torch.autograd.grad(row.sum(), x)
    assert torch.equal(gradient, torch.full_like(x, 2))
    assert done.names.count("slice_backward") <= 1  # of the zeros


def test_groups_cost_least_and_are_found_soon():
    def cost(groups):
        return sum(group[0] * (len(group) + states.WAITING_RUNS) for group in groups)

    numbers = np.random.default_rng(0)
    for _ in range(20):
        lengths = -np.sort(-numbers.choice([1, 2, 40, 60, 300, 512], 8))
        cuts = [[i + 1 for i in range(7) if bits >> i & 1] for bits in range(2**7)]
        best = min(cost(np.split(lengths, cut)) for cut in cuts)
        groups = states._split_by_length(np.arange(8), lengths)
        assert np.array_equal(np.concatenate(groups), np.arange(8))
        assert cost([lengths[group] for group in groups]) == best
    lengths = -np.sort(-numbers.integers(1, 513, 30_000))
    begun = time.process_time()
    states._split_by_length(np.arange(30_000), lengths)
    assert time.process_time() - begun < 5  # 0.05 here; all pairs of runs take minutes


def test_a_class_without_a_python_module():
    kind = type("Generated", (nn.Module,), {"__module__": "not_imported"})
    assert states.find_state_layers([kind()]) is None
    assert not attention._asks_for_function(kind())


@pytest.mark.parametrize("types", [(), ("sliding_attention",), ("full_attention",), ("hybrid",), ("hybrid", "moe")])
def test_a_window_is_that_of_sliding_layers(types):
    config = SimpleNamespace(_attn_implementation="sdpa", layer_types=types, sliding_window=2)
    ends, positions = torch.full((4,), 4), torch.arange(4)
    mask = attention.make_masks(config, ends, positions, torch.device("cpu"), torch.float32, dense=True)
    assert bool(mask[0, 0, 3, 0]) == (types not in ((), ("sliding_attention",)))


# --- whole models -----------------------------------------------------------------------------------------------------

LOSS = FusedLinearGRPOLoss("grpo")


def make_batch() -> dict[str, Tensor]:
    """Two completions of a prompt, two of its first answer, one of which is a single token, and another sequence."""
    numbers = torch.Generator().manual_seed(2)
    prompt, turn = (torch.randint(9, 211, (length,), generator=numbers) for length in (20, 7))
    tails = [torch.randint(9, 211, (length,), generator=numbers) for length in (6, 1, 9, 1)]
    rows = [torch.cat(parts) for parts in ([prompt, turn, tails[0]], [prompt, turn, tails[1]], [prompt, tails[2]])]
    rows += [torch.cat([prompt, tails[3]]), torch.randint(9, 211, (11,), generator=numbers)]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    attended = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    mask = attended & (torch.arange(ids.shape[1]) >= torch.tensor([20, 20, 20, 20, 3])[:, None])
    advantages = torch.tensor([1.0, -2.0, 0.5, 1.5, -1.0])
    return {"input_ids": ids, "attention_mask": attended.long(), "mask": mask, "advantages": advantages}


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    taken = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return taken


def run_alone(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities and gradients of each sequence in a row of its own."""
    loss, logps = 0, []
    for row in range(len(batch["input_ids"])):
        own = {name: column[row : row + 1] for name, column in batch.items()}
        own = {name: x[:, : int(own["attention_mask"].sum())] if x.dim() == 2 else x for name, x in own.items()}
        step = loss_step(model, own, LOSS)
        loss, _ = loss + step.loss / len(batch["input_ids"]), logps.append(step.per_token_logps)
    loss.backward()
    width = batch["input_ids"].shape[1]
    return torch.cat([nn.functional.pad(x, (0, width - x.shape[1])) for x in logps]), take_gradients(model)


NAMES = ("Qwen3_5Text", "OlmoHybrid", "KimiLinear", "NemotronH", "Lfm2", "FalconH1", "Mamba2")
WIDE = {"head_dim": 16}  # flex attention's least
CASES = [
    *((name, "cpu", {}) for name in NAMES),
    ("Zamba2", "cpu", {"use_mem_rope": False}),
    *on_gpu(*((name, "cuda", WIDE) for name in ("Qwen3_5Text", "OlmoHybrid", "NemotronH", "FalconH1"))),
    *on_gpu(("Lfm2", "cuda", {"hidden_size": 64}), ("Mamba2", "cuda", {})),
]


@needs_functions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "device", "sizes"), CASES)
def test_a_tree_of_three_levels(name, device, sizes, dtype):
    """In bfloat16 as far from float32 as rows of their own are."""
    if (name, dtype) == ("Mamba2", torch.bfloat16):
        pytest.skip("its backbone returns float32, and its own head gets bfloat16")
    exact = swap_lm_head(build(name, device, **sizes).train())
    model = swap_lm_head(build(name, device, **sizes).to(dtype).train())
    batch = {key: column.to(device) for key, column in make_batch().items()}
    expected, expected_gradients = run_alone(exact, batch)
    alone, alone_gradients = run_alone(model, batch)
    with sharing(True):
        done = loss_step(model, batch, LOSS)
    assert "in trees of shared prefixes" in done.layout
    done.loss.backward()
    own, far = (float((x.float() - expected).norm() / expected.norm()) for x in (done.per_token_logps, alone))
    assert own <= max(1.5 * far, 1e-5)
    own, far = (
        float(torch.cat([(g.float() - expected_gradients[key]).flatten() for key, g in found.items()]).norm())
        for found in (take_gradients(model), alone_gradients)
    )
    assert own <= max(1.5 * far, 1e-4 * float(torch.cat([g.flatten() for g in expected_gradients.values()]).norm()))


@needs_functions
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["Qwen3_5Text", "Bamba"])
def test_recomputed_layers_read_the_same_runs(name, reentrant):
    model = swap_lm_head(build(name).train())
    loss_step(model, make_batch(), LOSS).loss.backward()
    expected = take_gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    loss_step(model, make_batch(), LOSS).loss.backward()
    for key, gradient in take_gradients(model).items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-5, atol=1e-7)


@needs_functions
@pytest.mark.parametrize("name", ["Qwen3_5Text", "KimiLinear"])
def test_a_kernel_of_lengths_gets_one_call_for_each_depth(name, monkeypatch):
    """As fla's: one row, sums of lengths, a state for each run."""
    model = swap_lm_head(build(name).train())
    expected, _ = run_alone(model, make_batch())
    home = sys.modules[type(model.get_decoder()).__module__]
    (rule,) = (rule for rule in DELTA_RULES if hasattr(home, rule))
    reference, calls = vars(home)[rule], []

    def kernel(query, key, value, g, beta, initial_state=None, output_final_state=False, cu_seqlens=None, **options):
        if cu_seqlens is None:
            return reference(query, key, value, g=g, beta=beta, **options)
        assert cu_seqlens.dtype == torch.int64
        assert options.pop("cu_seqlens_cpu").tolist() == cu_seqlens.tolist()
        calls.append((cu_seqlens.tolist(), None if initial_state is None else tuple(initial_state.shape)))
        results = []
        for number, (start, stop) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
            cut = [x[:, start:stop] for x in (query, key, value)]
            own = None if initial_state is None else initial_state[number : number + 1]
            options |= {"g": g[:, start:stop], "beta": beta[:, start:stop]}
            results.append(reference(*cut, initial_state=own, output_final_state=True, **options))
        outputs, finals = zip(*results, strict=True)
        return torch.cat(outputs, 1), torch.cat(finals) if output_final_state else None

    states.restore_states()
    monkeypatch.setattr(home, rule, kernel)
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    loss_step(model, make_batch(), LOSS)  # its trial
    calls.clear()
    done = loss_step(model, make_batch(), LOSS)
    torch.testing.assert_close(done.per_token_logps, expected, rtol=1e-4, atol=1e-5)
    layers = len([layer for layer in model.config.layer_types if layer == "linear_attention"])
    assert len(calls) == 3 * layers
    states.restore_states()
    (roots, no_state), (middle, first), (leaves, second) = calls[:3]
    assert no_state is None
    assert (len(roots), len(middle), len(leaves)) == (1 + 2, 1 + 3, 1 + 2)
    assert (first[0], second[0]) == (3, 2)


@needs_functions
@NEEDS_GPU
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Qwen3_5Text", {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16}),
        ("KimiLinear", {"linear_head_dim": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}),
    ],
)
def test_kernels_of_fla_read_each_sequence_alone(name, sizes):
    """Values alone: before Triton 3.7.1 fla refuses its backward on Hopper. They have no float32."""
    pytest.importorskip("fla")
    model = swap_lm_head(build(name, "cuda", **sizes).to(torch.bfloat16).train())
    batch = {key: column.cuda() for key, column in make_batch().items()}
    with torch.no_grad(), sharing(True):
        done = loss_step(model, batch, LOSS)
        rows = [loss_step(model, {key: x[row : row + 1] for key, x in batch.items()}, LOSS) for row in range(5)]
    assert "in trees of shared prefixes" in done.layout
    expected = torch.cat([row.per_token_logps for row in rows])
    # A branch that takes another run's state is 0.1 nats off and more.
    torch.testing.assert_close(done.per_token_logps, expected, rtol=0, atol=0.06)


@needs_functions
def test_a_kernel_of_the_whole_mixer_is_left_out(monkeypatch):
    """It gives no place for a state. With None the layer calls its parts."""
    model, batch = swap_lm_head(build("Bamba").train()), make_batch()
    expected, _ = run_alone(model, batch)
    states.restore_states()
    home = sys.modules[type(model).__module__]
    monkeypatch.setattr(home, "mamba2_split_conv1d_scan_combined", lambda projected, *args, **options: projected * 0)
    try:
        with pytest.MonkeyPatch.context() as patch:  # its trial's rows run the kernel, too
            patch.setattr(step, "find_needed_trial", lambda *args, **options: 0)
            logps = loss_step(model, batch, LOSS).per_token_logps
    finally:
        states.restore_states()
    torch.testing.assert_close(logps, expected, rtol=1e-4, atol=1e-5)


class Kernel(nn.Module):
    """As a kernel of the hub: it does not say the names of its arguments."""

    def __init__(self, function) -> None:
        super().__init__()
        self.calls, self.function = 0, function

    def forward(self, *args, **options):
        self.calls += 1
        return self.function(*args, **options)


@needs_functions
@pytest.mark.parametrize("name", ["Qwen3_5Text", "Bamba"])
def test_functions_that_are_modules_or_replaced_later(name, monkeypatch):
    model, batch = swap_lm_head(build(name).train()), make_batch()
    expected, _ = run_alone(model, batch)
    states.restore_states()
    home = sys.modules[type(model).__module__]
    names = [function for function in states.NAMES if function in vars(home)]
    for _ in range(2):  # the second ones stand in front of ours
        kernels = [Kernel(vars(home)[function]) for function in names]
        for function, kernel in zip(names, kernels, strict=True):
            monkeypatch.setattr(home, function, kernel)
        torch.testing.assert_close(loss_step(model, batch, LOSS).per_token_logps, expected, rtol=1e-4, atol=1e-5)
        assert all(kernel.calls for kernel in kernels)
    states.restore_states()
    assert [vars(home)[function] for function in names] == kernels
    loss_step(model, batch, LOSS)
    monkeypatch.setattr(home, names[0], len)
    states.restore_states()
    assert vars(home)[names[0]] is len


@needs_functions
def test_without_runs_transformers_functions_run():
    states.restore_states()
    home = sys.modules[type(build("Bamba")).__module__]
    names = [name for name in ("causal_conv1d_fn", "mamba2_chunk_scan") if hasattr(home, name)]
    before = [vars(home)[name] for name in names]
    model = swap_lm_head(build("Bamba"))
    expected = model(input_ids=make_batch()["input_ids"]).logits
    assert "in trees" in loss_step(model, make_batch(), LOSS).layout
    assert [vars(home)[name] for name in names] != before
    assert torch.equal(model(input_ids=make_batch()["input_ids"], **{RUNS: None}).logits, expected)
    states.restore_states()
    assert [vars(home)[name] for name in names] == before


@needs_functions
@pytest.mark.parametrize("name", ["Jamba", "Zamba", "Mamba"])
def test_a_state_that_leaks_is_found(name, monkeypatch):
    alone = {"vocab_size": 211, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 1}
    monkeypatch.setitem(CONFIGS, "Mamba", alone)
    layout = loss_step(swap_lm_head(build(name).train()), make_batch(), LOSS).layout
    assert f"no prefix is shared: {name}ForCausalLM has layers with a state that no sequence can be given" in layout
    monkeypatch.setattr(states, "DECAY", None)
    layout = loss_step(swap_lm_head(build(name).train()), make_batch(), LOSS).layout
    assert "in padded rows; no prefix is shared" in layout
    # Mamba's layers multiply by the mask.
    assert ("lets a sequence see another one of its row" in layout) or (name == "Mamba" and "fails with" in layout)
