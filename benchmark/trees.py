"""Two versions of the package in turns: `python -m benchmark.trees OLD_FOLDER --out FOLDER`.

OLD_FOLDER holds another version of `liger_rl`, for example by `git archive COMMIT liger_rl | tar x -C OLD_FOLDER`. One
process runs each version, and the two take turns on one device. Both get the same inputs, and calls that both know.
A row has the median time of a call, its peak memory above the inputs, and how far the gradients are apart.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmark.command import parser_of, write
from benchmark.environment import ROOT, describe
from benchmark.memory import PeakMemory
from benchmark.table import Columns, environment_line, markdown_table, number
from benchmark.timing import once_ms

PREFIX = "trees-"
VOCAB = {"cuda": 128256, "cpu": 2000}
TOKENS = {"cuda": 8192, "cpu": 256}
HIDDEN = {"cuda": (4096, 2048, 1024), "cpu": (64,)}
TURNS = {"cuda": 5, "cpu": 1}
CALLS = 5  # in a turn
SURE = 1.5  # a token's logit of its own id is about SURE * sqrt(hidden size) / 4 above the others


class Inputs(NamedTuple):
    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    targets: Tensor  # (N,)
    advantages: Tensor  # (N,)
    mask: Tensor  # (N,)


def inputs_of(device: str, hidden_size: int, *, sure: bool) -> Inputs:
    tokens, vocab = TOKENS[device], VOCAB[device]
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator, dtype=torch.bfloat16)

    weight = normal(vocab, hidden_size) * hidden_size**-0.5
    targets = torch.randint(vocab, (tokens,), device=device, generator=generator)
    hidden = normal(tokens, hidden_size)
    if sure:
        hidden = hidden + SURE * hidden_size**0.5 * weight[targets] * (4 if hidden_size < 2048 else 2)
    mask = torch.rand(tokens, device=device, generator=generator) > (0.32 if sure else 0.0)
    return Inputs(hidden, weight, targets, torch.randn(tokens, device=device, generator=generator), mask)


def calls(case: str, inputs: Inputs) -> Callable[[], list[Tensor]]:
    """-> what one call of the case does; it returns the tensors that both versions must agree on."""
    import liger_rl

    hidden, weight = (tensor.detach().requires_grad_() for tensor in (inputs.hidden, inputs.weight))

    def gradients(loss: Tensor) -> list[Tensor]:
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    def policy(**options: Any) -> Callable[[], list[Tensor]]:
        loss_fn = liger_rl.FusedLinearGRPOLoss("dapo", **options)
        columns = (inputs.targets[None], inputs.advantages[None], inputs.mask[None])
        return lambda: gradients(loss_fn(hidden[None], weight, *columns).loss)

    def divergence(**options: Any) -> Callable[[], list[Tensor]]:
        teacher = (inputs.hidden.flip(0).contiguous(), inputs.weight)
        return lambda: gradients(liger_rl.linear_divergence(hidden, weight, *teacher, **options).divergence.mean())

    if case == "log-probabilities":
        return lambda: [liger_rl.linear_logprobs(inputs.hidden, inputs.weight, inputs.targets).logps]
    if case == "support":
        ids = 64
        rows = (inputs.targets[:, None] + torch.arange(ids, device=hidden.device) * 7) % weight.shape[0]
        offsets = torch.arange(len(rows) + 1, device=hidden.device) * ids
        support = liger_rl.Support(rows.flatten(), offsets, may_be_empty=False, distinct=True)
        return lambda: gradients(liger_rl.linear_logprobs(hidden, weight, inputs.targets, support=support).logps.mean())
    return {
        "two passes, exact": lambda: policy(passes="two", grad_tolerance=0),
        "one pass, exact": lambda: policy(passes="one", grad_tolerance=0),
        "RL batch, default": policy,
        "RL batch, exact": lambda: policy(grad_tolerance=0),
        "forward KL": divergence,
        "reverse KL": lambda: divergence(kind="reverse_kl"),
    }[case]()


def cases(sizes: Sequence[int]) -> Iterator[tuple[str, int]]:
    for size in sizes:
        for case in (
            "two passes, exact",
            "one pass, exact",
            "log-probabilities",
            "RL batch, default",
            "RL batch, exact",
        ):
            yield case, size
        yield from ((case, size) for case in ("forward KL", "reverse KL"))
    yield "support", sizes[0]


def serve(device: str, folder: Path) -> None:
    """Answer lines `["case", hidden size, "prepare" or "time" or "drop"]` until the input ends."""
    call = None
    for line in sys.stdin:
        case, size, action = json.loads(line)
        answer: Any = None
        if action == "prepare":
            inputs = inputs_of(device, size, sure=case.startswith("RL"))
            call = calls(case, inputs)
            call()  # compiles
            with PeakMemory(device) as peak:
                results = call()
            torch.save([result.detach().cpu() for result in results], folder / f"{os.getpid()}.pt")
            answer = {"peak_mib": peak.peak_bytes / 2**20, "file": str(folder / f"{os.getpid()}.pt")}
            del results
        elif action == "time":
            call()
            answer = [once_ms(call, device) for _ in range(CALLS)]
        else:
            call = inputs = None
            if device == "cuda":
                torch.cuda.empty_cache()
        print(json.dumps(answer), flush=True)


class Version:
    """The process of one version."""

    def __init__(self, tree: Path, device: str, folder: Path) -> None:
        command = [sys.executable, "-m", "benchmark.trees", "--serve", device, "--out", str(folder)]
        paths = [str(tree), str(folder / "helpers"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder
        )

    def ask(self, *question: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"the process of a version ended at {question}")
        return json.loads(line)

    def end(self) -> None:
        self.process.communicate()


def apart(files: list[str]) -> float:
    """The largest relative distance of two versions' results."""
    pairs = zip(*(torch.load(file) for file in files), strict=True)
    return max(
        (new.double() - old.double()).norm().item() / max(old.double().norm().item(), 1e-30) for old, new in pairs
    )


def measure(old: Path, device: str, folder: Path, sizes: Sequence[int], globs: Sequence[str]) -> list[dict[str, Any]]:
    (folder / "helpers").mkdir(parents=True, exist_ok=True)
    link = folder / "helpers" / "benchmark"
    if not link.exists():
        link.symlink_to(ROOT / "benchmark")
    versions = [Version(tree.resolve(), device, folder) for tree in (old, ROOT)]
    rows = []
    for case, size in cases(sizes):
        if not any(fnmatch(case, glob) for glob in globs):
            continue
        prepared = [version.ask(case, size, "prepare") for version in versions]
        times: list[list[float]] = [[], []]
        for _ in range(TURNS[device]):
            for version, measured in zip(versions, times, strict=True):
                measured += version.ask(case, size, "time")
        for version in versions:
            version.ask(case, size, "drop")
        before, after = (statistics.median(measured) for measured in times)
        rows.append(
            {
                "case": case, "hidden_size": size, "old_ms": before, "new_ms": after, "ratio": after / before,
                "old_mib": prepared[0]["peak_mib"], "new_mib": prepared[1]["peak_mib"],
                "apart": apart([answer["file"] for answer in prepared]),
            }
        )  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
    for version in versions:
        version.end()
    return rows


def markdown(results: dict[str, Any]) -> str:
    columns: Columns = {
        "old ms": number("old_ms", ".2f"),
        "new ms": number("new_ms", ".2f"),
        "new / old": number("ratio", ".3f"),
        "old MiB": number("old_mib", ",.0f"),
        "new MiB": number("new_mib", ",.0f"),
        "apart": number("apart", ".1e"),
    }
    rows = [(f"{row['case']}, H = {row['hidden_size']}", row | {"status": "ok"}) for row in results["rows"]]
    return f"{environment_line(results['environment'])}\n\n{markdown_table(columns, rows)}\n"


def main() -> None:
    if "--serve" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--serve")
        parser.add_argument("--out", type=Path)
        arguments = parser.parse_args()
        serve(arguments.serve, arguments.out)
        return
    parser = parser_of("trees", __doc__ or "")
    parser.add_argument("old", type=Path, help="the folder that holds the other version of liger_rl")
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="GLOB")
    parser.add_argument("--hidden", nargs="+", type=int, metavar="H", help="hidden sizes")
    arguments = parser.parse_args()
    environment = describe("auto")
    with tempfile.TemporaryDirectory() as folder:
        device = environment["device"]
        rows = measure(arguments.old, device, Path(folder), arguments.hidden or HIDDEN[device], arguments.cases)
    write(PREFIX, {"environment": environment, "rows": rows}, arguments, markdown)


if __name__ == "__main__":
    main()
