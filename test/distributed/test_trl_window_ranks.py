"""Runs of TRL's trainers on two ranks, with the micro-batches of an optimizer step in one forward."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("peft", reason="PEFT is not installed")

import trl_runs
from liger_rl.integrations.trl import report

SCRIPT = Path(__file__).with_name("trl_run_on_rank.py")
IDLE_SECONDS = 120  # without any processor time, after which ranks hang
CASES = (
    "SFT",
    "SFT, one long row",
    "SFT, reentrant checkpoints",
    "SFT, padding-free",
    "DPO, LoRA",
    "GRPO",
    "GRPO, checkpoints",
)
UNEVEN_CASES = (
    "GRPO, uneven",
    "GRPO, uneven, idle groups",
    "SFT, uneven",
    "SFT, uneven, averaged",
    "SFT, uneven, not logged",
    "DPO, uneven",
    "KTO, uneven",
)
DEEPSPEED_CASES = [(wrapper, case) for wrapper in ("zero1", "zero2", "zero3") for case in CASES]
DEEPSPEED_CASES += [("zero3-offload", case) for case in ("SFT", "GRPO, checkpoints")]
SHARED = {"DPO, LoRA", "GRPO", "GRPO, checkpoints"}  # each micro-batch has sequences of one prompt


def wait_while_they_work(processes: list[subprocess.Popen]) -> None:
    """Until all have ended, one has failed, or none has used the processor for a while. A loaded machine is no hang."""
    known, since = 0.0, time.monotonic()
    while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
        time.sleep(0.2)
        used = 0.0
        for process in processes:
            with suppress(psutil.Error):
                used += sum(psutil.Process(process.pid).cpu_times()[:2])
        # A rank that has ended has no time. One that waits in a collective wakes up for milliseconds.
        if abs(used - known) > 0.05:
            known, since = used, time.monotonic()
        assert time.monotonic() - since < IDLE_SECONDS, "the ranks wait for each other"


def run_on_ranks(directory: Path, *wrappers: str) -> list[dict]:
    """-> the results of each rank, of all wrappers. Ranks that hang are ended, and the test fails."""
    model = trl_runs.save_model("qwen3", directory)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    processes, logs = [], [directory / f"log-{rank}" for rank in range(2)]
    for rank in range(2):
        environment = os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, SCRIPT, model, directory / str(rank), *wrappers]
        with logs[rank].open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        wait_while_they_work(processes)
    finally:
        for process in processes:
            process.kill()
    assert not any(process.wait() for process in processes), "\n".join(log.read_text()[-3000:] for log in logs)
    return [json.loads((directory / str(rank)).read_text()) for rank in range(2)]


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


def assert_same_runs(result, case):
    plain, patched = result[case]
    steps = len(plain["log"]["loss"])
    # Each micro-batch of padding-free rows has its own forward.
    number = 2 * steps if case == "SFT, padding-free" else steps
    assert (plain["calls"], plain["backwards"]) == (2 * steps, 2 * steps)
    assert (patched["calls"], patched["backwards"]) == (number, number)
    assert patched["tokens"] <= (0.7 if case in SHARED else 1) * plain["tokens"]
    assert_same_results(plain, patched)


def assert_same_results(plain, patched):
    assert patched["weights"] == pytest.approx(plain["weights"], abs=1e-6)
    assert patched["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-6, abs=1e-5)
    assert patched["log"].keys() - plain["log"].keys() == {report.TOKENS, report.SAVED}
    assert plain["log"].keys() <= patched["log"].keys()
    for name, values in plain["log"].items():
        assert patched["log"][name] == pytest.approx(values, rel=1e-6, abs=1e-5), name


def assert_same_runs_in_even_time(results, case):
    """Micro-batches change ranks, which then have about equally many tokens."""
    for plain, patched in results:
        assert_same_results(plain, patched)
        assert patched["calls"] == plain["calls"] / 4
        # Once in an optimizer step that gets faster; not at the end of KTO's epoch.
        assert 0 < patched["exchanges"] <= patched["calls"] - (case == "KTO, uneven")
        assert plain["exchanges"] == 0
    if case == "GRPO, uneven, idle groups":  # without forwards for old log-probabilities
        before, after = ([runs[patch]["tokens"] for runs in results] for patch in (0, 1))
        assert before[0] > 1.8 * before[1]
        assert max(after) < 1.25 * min(after)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.parametrize("case", CASES)
def test_runs_agree(case, wrapper, torch_results):
    for results in torch_results:
        assert_same_runs(results[wrapper], case)


@pytest.mark.parametrize("case", UNEVEN_CASES)
def test_uneven_runs_agree(case, torch_results):
    assert_same_runs_in_even_time([results["ddp"][case] for results in torch_results], case)


def test_a_switch_leaves_micro_batches_where_they_are(torch_results):
    for results in torch_results:
        plain, patched = results["ddp"]["SFT, uneven, not exchanged"]
        assert_same_results(plain, patched)
        assert patched["exchanges"] == 0


def test_ranks_of_a_sharded_model_keep_their_micro_batches(torch_results):
    for results in torch_results:
        plain, patched = results["fsdp2"]["GRPO, uneven, idle groups"]
        assert_same_results(plain, patched)
        assert patched["exchanges"] == 0


def test_uneven_runs_of_deepspeed_agree(run_deepspeed):
    case = "GRPO, uneven, idle groups"
    assert_same_runs_in_even_time([results[case] for results in run_deepspeed("zero2")], case)


@pytest.mark.parametrize(("wrapper", "case"), DEEPSPEED_CASES)
def test_runs_of_deepspeed_agree(case, wrapper, run_deepspeed):
    for results in run_deepspeed(wrapper):
        assert_same_runs(results, case)


def test_lora_layers_under_zero_3(run_deepspeed):
    """One Function, with PEFT's values to the rounding of bfloat16."""
    for results in run_deepspeed("zero3"):
        plain, patched = results["SFT, LoRA in bfloat16"]
        assert (plain["lora_calls"], patched["calls"]) == (0, plain["calls"] / 2)
        assert patched["lora_calls"] >= patched["calls"]
        for name in ("loss", "grad_norm"):
            assert patched["log"][name] == pytest.approx(plain["log"][name], rel=2**-7), name
