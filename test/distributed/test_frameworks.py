"""What frameworks call with hidden states and a head: full logits in float64 are the truth, and what is refused.

Each framework's own code beside ours: the file of its name. Alone and over ranks.
"""

from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import megatron_layers
from framework_calls import BATCH, HIDDEN, IDS, LENGTH, VOCAB, Case, alone, assert_full_logits, problem, solve
from liger_rl.integrations.megatron import fused_output as of_megatron
from liger_rl.integrations.nemo_rl import from_parallel_hidden_states_to_logprobs
from liger_rl.integrations.prime_rl import fused_output as of_prime_rl
from liger_rl.integrations.skyrl import fused_lm_head_logprob_apply
from liger_rl.integrations.verl import linear_cross_entropy
from ranks import message_of

CASES = [
    *(Case("verl", temperature, masked=masked) for temperature, masked in ((1.0, True), (0.7, False))),
    Case("verl", "of tokens"),
    *(
        Case("prime_rl", temperature, softcap, replay=replay)
        for temperature in (0.7, "of tokens")
        for softcap in (None, 5.0)
        for replay in (False, True)
    ),
    *(Case("skyrl", temperature) for temperature in (1.0, 0.7)),
    Case("skyrl", dtype=torch.bfloat16),
    *(Case("nemo_rl", context=context, pad=pad) for context, pad in ((1, 0), (2, 0), (2, 1), (4, 0))),
    Case("megatron", 0.8, masked=True),
    Case("megatron", sequence_parallel=True, masked=True),
    Case("megatron", "of tokens", sequence_parallel=True),
    Case("megatron", tied=True, scale=0.25),
    Case("megatron", fusion=True),
    Case("megatron", fusion=True, tied=True, sequence_parallel=True, dtype=torch.bfloat16),
    Case("megatron", 0.8, context=2),
    Case("megatron", replay=True),
]


@pytest.mark.parametrize("case", [case for case in CASES if case.framework in ("verl", "prime_rl")], ids=str)
def test_one_process_has_the_numbers_of_full_logits(case, device):
    assert_full_logits([solve(alone(device), case)], case)


OVER_RANKS = [case for case in CASES if case.framework != "prime_rl"]


@pytest.mark.parametrize("case", [case for case in OVER_RANKS if case.context == 1], ids=str)
def test_ranks_have_the_numbers_of_full_logits(ranks, case, world):
    assert_full_logits(ranks.run(solve, case, **world), case)


@pytest.mark.parametrize("case", [case for case in OVER_RANKS if case.context > 1], ids=str)
def test_context_parallel_ranks_have_the_numbers_of_full_logits(ranks, case):
    assert_full_logits(ranks.run(solve, case, world=4), case)


@pytest.mark.parametrize("case", [Case("verl"), Case("skyrl"), Case("megatron", sequence_parallel=True)], ids=str)
def test_one_rank(ranks, case):
    assert_full_logits(ranks.run(solve, case, world=1), case)


# --- what is refused --------------------------------------------------------------------------------------------------

LABELS = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
# Framework -> what a right call is given otherwise, and how the error begins.
REFUSALS = {
    "verl": [
        ({"hidden": [0.0]}, "TypeError: hidden must be a tensor"),
        ({"hidden": torch.zeros(HIDDEN)}, "ValueError: hidden must be (..., H)"),
        ({"weight": torch.zeros(VOCAB, HIDDEN + 1)}, "ValueError: weight must be (V, H)"),
        ({"weight": torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16)}, "TypeError: weight must be"),
        ({"labels": [0]}, "TypeError: labels must be a tensor"),
        ({"labels": LABELS[:, 1:]}, "ValueError: labels must have 16 elements"),
        ({"labels": torch.zeros(16, 0, dtype=torch.int64)}, "ValueError: labels must have 16 elements"),
        ({"labels": LABELS.repeat(2, 1)}, "ValueError: labels must have 16 elements"),
        ({"labels": LABELS + VOCAB}, "ValueError: targets must be token ids"),
        ({"temperature": 0.0}, "ValueError: temperature must be"),
        ({"temperature": torch.ones(15)}, "ValueError: temperature must be"),
        ({"temperature": torch.ones(16).long()}, "TypeError: temperature must be"),
        ({"reduction": "batchmean"}, "ValueError: reduction must be one of"),
        ({"reduction": None}, "ValueError: reduction must be one of"),
    ],
    "prime_rl": [
        ({"temperature": torch.zeros(BATCH, LENGTH)}, "ValueError: temperature"),
        ({"labels": LABELS + VOCAB}, "ValueError: targets must be"),
        ({"sampling_mask": torch.zeros(BATCH, LENGTH - 1, IDS)}, "RuntimeError: shape"),
    ],
    "nemo_rl": [
        ({"vocab_end_index": VOCAB - 1}, "ValueError: vocab_end_index must be vocab_start_index + 40"),
        ({"target": torch.zeros(BATCH, LENGTH + 1).long()}, "ValueError: target must be the whole sequence of up to 8"),
        ({"cp_group": "the world"}, "ValueError: target must be the whole sequence of up to 32 ids"),
        ({"target": LABELS + VOCAB}, "ValueError: targets must be"),
    ],
    "skyrl": [
        ({"vocab_end_index": VOCAB + 1}, "ValueError: vocab_end_index must be vocab_start_index + 40"),
        ({"target": LABELS + VOCAB}, "ValueError: targets must be"),
    ],
    "megatron": [
        (
            {"output_layer": torch.nn.Linear(HIDDEN, VOCAB)},
            "TypeError: output_layer must be a ColumnParallelLinear with its own forward, got Linear",
        ),
        ({"labels": None}, "TypeError: labels must be a tensor"),
        ({"labels": LABELS[:, 1:]}, "ValueError: labels must be (b, s) = (2, 8), got (2, 7)"),
        ({"labels": LABELS + VOCAB}, "ValueError: targets must be"),
        ({"loss_mask": torch.ones(BATCH, 7)}, "ValueError: loss_mask must be (b, s) = (2, 8), got (2, 7)"),
        ({"inference_context": object()}, "ValueError: inference_context must be None, got object"),
        ({"scale_logits": torch.tanh}, "ValueError: scale_logits must multiply by a number"),
        ({"context": {"softcap": 30.0}}, "TypeError: output_processor_context must hold temperature, entropy, support"),
    ],
}  # fmt: skip


def right_call(rank, framework: str):
    """Of any number of ranks, unless the hidden states are parts of a sequence."""
    x = problem(Case("verl"))
    hidden, weight, labels = x.hidden, x.weight.chunk(rank.world)[rank.index].clone(), x.labels
    first = len(weight) * rank.index
    part = {"vocab_start_index": first, "vocab_end_index": first + len(weight), "tp_group": rank.group}
    layer = megatron_layers.output_layer(weight.clone(), rank.group) if framework == "megatron" else None
    calls = {
        "verl": (
            linear_cross_entropy,
            {"hidden": hidden, "weight": weight, "labels": labels, "dist_process_group": rank.group},
        ),
        "prime_rl": (
            partial(of_prime_rl, SimpleNamespace(weight=weight), hidden),
            {"labels": labels, "temperature": torch.ones(BATCH, LENGTH)},
        ),
        "nemo_rl": (
            partial(from_parallel_hidden_states_to_logprobs, hidden.transpose(0, 1), weight),
            {"target": labels, "runtime_gather_output": None, **part},
        ),
        "skyrl": (
            partial(fused_lm_head_logprob_apply, "triton", hidden, weight),
            {"target": labels, "chunk_size": 4, "inference_only": True, **part},
        ),
        "megatron": (
            of_megatron,
            {
                "hidden_states": hidden.transpose(0, 1), "output_layer": layer, "output_weight": None,
                "labels": labels, "scale_logits": lambda logits: logits,
            },
        ),
    }  # fmt: skip
    return calls[framework]


def refusals(rank, framework):
    function, given = right_call(rank, framework)
    found = []
    for changed, _ in REFUSALS[framework]:
        if "cp_group" in changed:
            changed = {"cp_group": dist.group.WORLD}
        found.append(message_of(partial(function, **given | changed)))
    return message_of(partial(function, **given)), found


@pytest.mark.parametrize("framework", REFUSALS)
def test_what_does_not_fit_is_refused_by_name(ranks, framework):
    ((right, found),) = ranks.run(refusals, framework, world=1)
    assert right is None
    for message, (_, beginning) in zip(found, REFUSALS[framework], strict=True):
        assert message.startswith(beginning)


# What one rank alone has otherwise, and the error of every rank.
OF_ONE_RANK = {
    "verl": ({"labels": LABELS[:, 1:]}, "ValueError: labels must have 16 elements"),
    "verl's hidden": ({"hidden": [0.0]}, "TypeError: hidden must be a tensor"),
    "verl's reduction": ({"reduction": None}, "ValueError: reduction must be one of"),
    "verl's temperature": ({"temperature": 0.0}, "ValueError: temperature must be"),
    "nemo_rl": ({"target": torch.zeros(BATCH, 3 * LENGTH).long()}, "ValueError: target must be the whole sequence"),
    "nemo_rl's end": ({"vocab_end_index": VOCAB - 1}, "ValueError: vocab_end_index must be vocab_start_index + 20"),
    "skyrl": ({"vocab_end_index": VOCAB - 1}, "ValueError: vocab_end_index must be vocab_start_index + 20"),
    "megatron": ({"labels": LABELS[:, 1:]}, "ValueError: labels must be (b, s) = (2, 8), got (2, 7)"),
    "megatron's mask": ({"loss_mask": torch.ones(BATCH, 7)}, "ValueError: loss_mask must be (b, s) = (2, 8)"),
}


def refusals_of_one_rank(rank):
    messages = []
    for framework, (changed, _) in OF_ONE_RANK.items():
        function, given = right_call(rank, framework.split("'")[0])
        messages.append(message_of(partial(function, **given | (changed if rank.index == 1 else {}))))
    return messages


def test_what_one_rank_refuses_is_refused_on_all(ranks):
    for messages in ranks.run(refusals_of_one_rank):
        for message, (_, beginning) in zip(messages, OF_ONE_RANK.values(), strict=True):
            assert message.startswith(beginning)
            assert message.endswith("(rank 1 of vocab_parallel.group)")


def states_of_a_layer(rank):
    """-> what is refused of a Megatron layer in each state; nothing is left behind on it."""
    function, given = right_call(rank, "megatron")
    layer, found = given["output_layer"], {}

    def note(name):
        found[name] = message_of(partial(function, **given))

    hook = layer.register_forward_hook(lambda _layer, _args, output: (output[0] * 2, None))
    note("output_layer must have no hooks that change its output")
    hook.remove()
    layer.config.defer_embedding_wgrad_compute = True
    note("defer_embedding_wgrad_compute must be False")
    layer.config.defer_embedding_wgrad_compute = False
    layer.weight.__fsdp_param__ = True
    note("output_layer must not be sharded by Megatron-FSDP")
    del layer.weight.__fsdp_param__
    layer.gradient_accumulation_fusion, layer.weight.main_grad = True, torch.zeros(VOCAB, HIDDEN).bfloat16()
    note("main_grad of output_layer's weight must be float32")
    layer.gradient_accumulation_fusion = False
    import megatron.core

    with patch.object(megatron.core, "__version__", "0.17.1"), pytest.raises(ImportError, match=r"found 0\.17\.1"):
        function(**given)
    layer.forward = lambda *_: None
    note("output_layer must be a ColumnParallelLinear with its own forward")
    del layer.forward
    assert "_forward_impl" not in vars(layer)
    calls = []
    layer.register_forward_pre_hook(lambda *_: calls.append(vars(layer)["_forward_impl"]))
    function(**given)
    assert len(calls) == 1  # what waits for gathered parameters
    return found


def test_states_of_a_megatron_layer_that_are_refused(ranks):
    (found,) = ranks.run(states_of_a_layer, world=1)
    for beginning, message in found.items():
        assert message.split(": ", 1)[1].startswith(beginning)


def uneven(rank):
    weight = torch.ones(5 + rank.index, 4)
    return message_of(lambda: linear_cross_entropy(torch.ones(3, 4), weight, LABELS[0, :3], 1.0, "none", rank.group))


def test_parts_of_different_size_raise_everywhere(ranks):
    for message in ranks.run(uneven):
        assert message.startswith("ValueError: the shards of weight must cover")
