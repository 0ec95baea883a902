"""What the numbers were taken on, and where they are written.

`python -m benchmark.environment DEVICE` prints the environment and the speed of a matmul as one JSON line.
"""

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
OUT = ROOT / "out" / "benchmark"  # ignored by git
# Threads that share their cores with other processes wait for each other at every barrier, up to ten times as long as
# they compute. One is slower on idle cores, and its times repeat.
CPU_THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))
# What the peers need.
PACKAGES = ("liger-kernel", "trl", "cut-cross-entropy", "verl", "nvidia-cutlass-dsl", "transformers")


def describe(device: str) -> dict[str, Any]:
    """`device`: "auto", "cpu" or "cuda". Run in a process of its own: it may start CUDA."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch sees no CUDA device")
    cuda = device == "cuda"
    return {
        "device": device,
        "device_name": torch.cuda.get_device_name() if cuda else _cpu_name(),
        "driver": _driver() if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        # Runnable processes per minute before the run: above 0.5 somebody else was using the processor.
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        **{package_key(name): version(name) for name in PACKAGES},
        **_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def package_key(name: str) -> str:
    """A package's key in an environment."""
    return name.replace("-", "_")


def slug(environment: dict[str, Any]) -> str:
    """File name of a device's results."""
    if environment["device"] == "cpu":
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "-", environment["device_name"].lower()).strip("-")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """--out and --record, which `output_directory` takes."""
    options = parser.add_mutually_exclusive_group()
    options.add_argument("--out", type=Path, metavar="DIR", help="where to write; default: out/benchmark")
    options.add_argument("--record", action="store_true", help="write the tracked files of benchmark/results")


def output_directory(out: Path | None, *, record: bool) -> Path:
    """`benchmark/results` only if `record` asks for it."""
    if out is not None and out.resolve().is_relative_to(RESULTS):
        raise SystemExit(f"--out {out}: --record writes there")
    directory = RESULTS if record else out or OUT
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def read_results(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def write_results(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def first_line(error: BaseException) -> str:
    """Of an error's text, for a row's reason."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].split(". GPU ")[0][:160]


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _driver() -> str | None:
    query = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return query.splitlines()[0].strip() if query else None


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> dict[str, Any]:
    top = _output("git", "rev-parse", "--show-toplevel")
    commit = _output("git", "rev-parse", "HEAD")
    if not commit or Path(top or "").resolve() != ROOT:
        return {"commit": os.environ.get("LIGER_RL_COMMIT", "unknown"), "dirty": None}
    # Results are what a run writes, so they do not make the code it ran another one.
    changes = _output("git", "status", "--porcelain", "--", ".", ":!benchmark/results")
    return {"commit": commit, "dirty": bool(changes)}


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def flop_per_second(device: str) -> float:
    """Of a first matmul in the dtype that the cases of the device have, for an estimate of a run's time."""
    import torch

    cuda = device == "cuda"
    n = 8192 if cuda else 1024
    matrix = torch.ones(n, n, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    matrix @ matrix
    begun = time.perf_counter()
    (matrix @ matrix)[0, 0].item()  # waits for the result
    return 2 * n**3 / (time.perf_counter() - begun)


if __name__ == "__main__":
    import torch

    environment = describe(sys.argv[1] if len(sys.argv) > 1 else "auto")
    if environment["device"] == "cpu":
        torch.set_num_threads(CPU_THREADS)
        environment["threads"] = CPU_THREADS
    print(json.dumps({"environment": environment, "flop_per_second": flop_per_second(environment["device"])}))
