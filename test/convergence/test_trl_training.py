"""Runs of TRL's trainers in bfloat16, with and without the patch; in float32: test/integrations/test_trl_runs.py.

A bfloat16 run may be no further from the float32 run with the patch than without it. The body's own rounding makes most
of either distance and, grown along the run, scatters it, so each distance is a mean over models drawn from several
seeds, and `SLACK` is what that mean needs.
"""

import pytest

pytest.importorskip("trl", reason="TRL is not installed")

import trl_runs

pytestmark = pytest.mark.convergence

SEEDS = 4
# A head larger than the random one, as trained heads are; steps small enough for 20 of them not to diverge.
HEAD_GAIN, CALM = 2.0, {"learning_rate": 5e-4, "max_grad_norm": 0.1}
SLACK = 1.1


@pytest.mark.parametrize("model", ["qwen3", "gemma2"])
@pytest.mark.parametrize("kind", ["GRPO", "SFT", "DPO"])
def test_bfloat16_is_no_further_from_float32(kind, model, tmp_path):
    options = {**CALM, "entropy_coef": 0.02} if kind == "GRPO" else CALM
    distances = {False: {}, True: {}}
    for seed in range(SEEDS):
        path = trl_runs.save_model(model, tmp_path, seed=seed, head_gain=HEAD_GAIN)
        script = [] if kind == "GRPO" else None  # the same completions for all three
        exact = trl_runs.train(kind, path, tmp_path, patch=False, script=script, seed=seed, **options)
        for patch, sums in distances.items():
            run = trl_runs.train(
                kind, path, tmp_path, patch=patch, script=script, seed=seed, dtype="bfloat16", **options
            )
            assert (run.head_calls > 0) == patch
            found = {
                name: trl_runs.log_distance(run, exact, name) for name in ("loss", "entropy", "kl") if name in run.log
            }
            for name, value in {**found, "weights": trl_runs.weight_distance(run, exact)}.items():
                sums[name] = sums.get(name, 0.0) + value / SEEDS
    ratios = {name: distances[True][name] / distances[False][name] for name in distances[True]}
    print(kind, model, ratios)
    assert max(ratios.values()) <= SLACK, ratios
