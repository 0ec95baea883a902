"""What is said of the runs of a published model: the planned test, on curves whose answer is known."""

import pytest

pytest.importorskip("benchmark.cases", reason="the benchmark is not part of an installed package")

from benchmark import train_real_runs

ENVIRONMENT = {
    "device": "cpu",
    "device_name": "a CPU",
    "threads": 1,
    "torch": "2",
    "commit": "c",
    "dirty": False,
    "date": "d",
}
ABOUT = {"model": "M", "steps": 20, "plan": train_real_runs.PLAN}


def curves(variant, seed, end, steps=20):
    values = [0.0] * 16 + [end] * (steps - 16)
    return {"variant": variant, "seed": seed, "reward": values, "kl": values, "entropy": values}


def test_a_run_ends_with_the_mean_of_its_last_fifth():
    runs = [curves(variant, 0, 0.5) for variant in train_real_runs.VARIANTS]
    runs.append(curves("trl", 1, 0.9))  # a seed without its other runs
    assert train_real_runs.ends({"runs": runs}) == {
        (variant, 0): dict.fromkeys(train_real_runs.CURVES, 0.5) for variant in train_real_runs.VARIANTS
    }
    # One that was stopped early cuts all of them: the last 4 of 18 steps are half before the rise.
    runs[1] = curves("default", 0, 0.5, steps=18)
    found = train_real_runs.ends({"runs": runs})
    assert {ends["reward"] for ends in found.values()} == {0.25}


def test_signs_are_flipped_in_every_way():
    assert train_real_runs.sign_flip_p([1.0, 2.0, 3.0, 4.0, 5.0]) == 2 / 32
    # |1 + 2 - 3| = 0 is reached or passed by every flip.
    assert train_real_runs.sign_flip_p([1.0, 2.0, -3.0]) == 1.0
    # Of ±1 ±1 ±1 ±1 the sums beyond 2 in size are 10 of 16.
    assert train_real_runs.sign_flip_p([1.0, 1.0, 1.0, -1.0]) == 10 / 16


def test_the_table_shows_differences_within_seeds():
    gains = {"trl": 0.0, "default": 0.1, "exact": 0.0}
    runs = [curves(name, seed, 0.2 * seed + gain) for name, gain in gains.items() for seed in range(4)]
    lines = train_real_runs.markdown(ABOUT | {"environment": ENVIRONMENT, "runs": runs}).splitlines()
    rows = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in lines if line.startswith("| ")}
    assert rows["default - trl"] == "0.1000 ± 0.0000 (p 0.12)"
    assert rows["exact - trl"] == "0.0000 ± 0.0000 (p 1.00)"
    assert rows["trl"].startswith("0.3000 ± 0.12")
