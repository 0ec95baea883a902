#!/usr/bin/env bash
# Run the tests that depend most on other packages in an environment made for the versions that are named:
#   test/versions.sh python3.12 torch==2.14.1 triton==3.8.0 transformers==5.17.0
# What was run, and what passed, is in docs/notes/tables.md. A CUDA build of PyTorch takes several GB of disk for the while.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
environment=${VERSIONS_ENVIRONMENT:-$(mktemp -d)} # name a folder to keep the environment
if [[ -z ${VERSIONS_ENVIRONMENT:-} ]]; then trap 'rm -rf "$environment"' EXIT; fi
"$python" -m venv "$environment"
install() { "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
# One by one and in their order: a later one may replace what an earlier one has brought, which is what is tried here.
for requirement in "$@"; do install "$requirement"; done
install hypothesis "numpy<2.4" "peft>=0.17" pytest pytest-timeout "setuptools>=77" wheel
install --no-deps --no-build-isolation .
export OMP_NUM_THREADS=1
"$environment/bin/python" -m pytest -p no:cacheprovider -o addopts= -W ignore::DeprecationWarning \
  test/kernels test/losses/test_fused.py test/test_kernels_compile.py test/head/test_logprobs.py \
  test/head/test_compile.py test/fused_linear/test_grpo.py test/integrations/test_transformers.py \
  test/integrations/test_swap_refusals.py
