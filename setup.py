"""Packaging of liger_rl. `pip install liger_rl` needs torch and, on Linux, triton; the rest are extras."""

from pathlib import Path

from setuptools import find_packages, setup

HF = ["transformers>=4.57"]
PEFT = [*HF, "peft>=0.17"]
TRL = [*HF, "trl>=1.15,<1.17"]
BENCHMARK = ["liger-kernel>=0.8.5", "matplotlib>=3.8"]
TEST = ["hypothesis>=6.100", "pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.5"]
DEV = [*PEFT, *TRL, *BENCHMARK, *TEST, "mypy>=1.10", "ruff>=0.6", "tqdm>=4.66"]

setup(
    name="liger_rl",
    version="0.1.0",
    description="A fused lm_head and policy loss: per-token log-probabilities for RL without the logits.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["liger_rl", "liger_rl.*"]),
    package_data={"liger_rl": ["py.typed"]},
    install_requires=["torch>=2.8", 'triton>=3.4; platform_system == "Linux"'],
    extras_require={"hf": HF, "peft": PEFT, "trl": TRL, "benchmark": BENCHMARK, "dev": DEV},
)
