"""Runs of TRL's trainers on two ranks, with the micro-batches of an optimizer step in one forward."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="PEFT is not installed")

from trl_run_on_rank import (
    DISTILLATION,
    IDLE_GROUPS,
    KEPT,
    MIXED,
    NOT_EXCHANGED,
    OFFLOADED_ROWS,
    ROWS,
    SHARDED,
    UNEVEN_ROWS,
    Pair,
    main,
)

import trl_runs
from forks import run_ranks

# `run_ranks` decides, and not the time that a loaded machine takes.
pytestmark = pytest.mark.timeout(0)
DEEPSPEED_ROWS = [(wrapper, name) for wrapper in ("zero1", "zero2", "zero3") for name in ROWS]
DEEPSPEED_ROWS += [("zero3", name) for name in SHARDED] + [("zero3-offload", name) for name in OFFLOADED_ROWS]


def run_on_ranks(directory: Path, *wrappers: str) -> list[dict[str, dict[str, Pair]]]:
    """-> the results of each rank, of all wrappers. Ranks that hang are ended, and the test fails."""
    trl_runs.save_model("granite", directory, seed=1)  # the teacher
    run_ranks(directory, main, trl_runs.save_model("qwen3", directory), directory, *wrappers)
    return [torch.load(directory / str(rank), weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def torch_results(tmp_path_factory):
    return run_on_ranks(tmp_path_factory.mktemp("torch"), "ddp", "fsdp2")


@pytest.fixture(scope="module")
def run_deepspeed(tmp_path_factory):
    """A wrapper -> its results of each rank. Each runs by itself, so that a machine under load has the time for it."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    known = {}

    def run(wrapper):
        if wrapper not in known:
            known[wrapper] = None  # until its ranks have ended well
            known[wrapper] = run_on_ranks(tmp_path_factory.mktemp(wrapper), wrapper)
        assert known[wrapper] is not None, f"the ranks of {wrapper} have failed in another test"
        return [results[wrapper] for results in known[wrapper]]

    return run


def assert_same_runs(results: list[dict[str, Pair]], name: str) -> None:
    """Of a row that each rank has run, more closely than of one process: log, and each weight."""
    if name.startswith("Distillation"):
        pytest.importorskip("trl", "1.16", reason="TRL 1.16 is not installed")
    row = (ROWS | DISTILLATION | SHARDED | UNEVEN_ROWS | NOT_EXCHANGED | KEPT)[name]
    for result in results:
        plain, patched, *_ = result[name]
        assert len(plain.padded_tokens) == row.options["max_steps"]
        trl_runs.assert_same_run(patched, plain, row, relative=1e-6)
        torch.testing.assert_close(patched.weights, plain.weights, rtol=0, atol=1e-6)


def assert_same_runs_in_even_time(results: list[dict[str, Pair]], name: str) -> None:
    """Micro-batches change ranks, which then have about equally many tokens."""
    assert_same_runs(results, name)
    pairs = [result[name] for result in results]
    for pair in pairs:
        # Once in an optimizer step that gets faster; not at the end of KTO's epoch.
        before, after = pair.exchanges
        assert before == 0 < after <= pair.patched.backwards - (name == "KTO, uneven")
    if name in IDLE_GROUPS:  # without forwards for old log-probabilities
        before, after = ([run.tokens for run in runs] for runs in zip(*(pair[:2] for pair in pairs), strict=True))
        assert before[0] > 1.8 * before[1]
        assert max(after) < 1.25 * min(after)


def of_wrapper(results: list[dict], wrapper: str) -> list[dict[str, Pair]]:
    return [result[wrapper] for result in results]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", ROWS | DISTILLATION)
def test_the_patched_run_is_trls_run(name, wrapper, torch_results):
    assert_same_runs(of_wrapper(torch_results, wrapper), name)


@pytest.mark.parametrize("name", SHARDED)
def test_calls_that_only_one_rank_could_join(name, torch_results):
    assert_same_runs(of_wrapper(torch_results, "fsdp2"), name)


@pytest.mark.parametrize("name", MIXED)
def test_micro_batches_alone_on_one_rank(name, torch_results):
    """Collectives come in the same order on both ranks, and TRL's metrics of the same micro-batches."""
    for plain, patched, *_ in (results[name] for results in of_wrapper(torch_results, "ddp")):
        trl_runs.assert_same_run(patched, plain, relative=1e-6)
        torch.testing.assert_close(patched.weights, plain.weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", UNEVEN_ROWS)
def test_uneven_ranks(name, torch_results):
    assert_same_runs_in_even_time(of_wrapper(torch_results, "ddp"), name)


@pytest.mark.parametrize(
    ("wrapper", "name"),
    [("ddp", *NOT_EXCHANGED), ("fsdp2", *IDLE_GROUPS), *(("ddp", name) for name in KEPT)],
    ids=["a switch", "a sharded model", *KEPT],
)
def test_micro_batches_stay_where_they_are(name, wrapper, torch_results):
    results = of_wrapper(torch_results, wrapper)
    assert_same_runs(results, name)
    assert [result[name].exchanges for result in results] == [[0, 0]] * 2


def test_uneven_ranks_of_deepspeed(run_deepspeed):
    for name in IDLE_GROUPS:
        assert_same_runs_in_even_time(run_deepspeed("zero2"), name)


@pytest.mark.parametrize(("wrapper", "name"), DEEPSPEED_ROWS)
def test_the_patched_run_of_deepspeed_is_trls_run(name, wrapper, run_deepspeed):
    assert_same_runs(run_deepspeed(wrapper), name)


def test_lora_layers_under_zero_3(run_deepspeed):
    """One Function, with PEFT's values to the rounding of bfloat16."""
    for results in run_deepspeed("zero3"):
        plain, patched, _, (before, after) = results["SFT, LoRA in bfloat16"]
        assert (before, patched.calls) == (0, plain.calls / 2)
        assert after >= patched.calls
        for name in ("loss", "grad_norm"):
            assert patched.log[name] == pytest.approx(plain.log[name], rel=2**-7), name
