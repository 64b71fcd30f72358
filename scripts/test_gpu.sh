#!/bin/sh
# Kernel tests and tests marked `gpu` with the packages that $PYTHON has; no environment is made, nothing is
# downloaded. Packages that are missing may lie as wheels in .whl/ and are unpacked into build/site.
# `--part 1/3` to `--part 3/3`: thirds that take about as long, for machines that are lent for some minutes.
set -eu
cd "$(dirname "$0")/.."
site=build/site
if ls .whl/*.whl >/dev/null 2>&1; then
  "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" .whl/*.whl
fi
export PYTHONPATH="src:$site${PYTHONPATH:+:$PYTHONPATH}"
cmake -S . -B build/gpu -DPython_EXECUTABLE="$(command -v "$PYTHON")" >/dev/null
cmake --build build/gpu --parallel
kernel_tests=$(ls tests/kernels/test_ops.py tests/kernels/test_kernels*.py tests/kernels/test_worker_pool.py \
  tests/kernels/test_nodes.py tests/kernels/test_symbols.py tests/models/test_models.py 2>/dev/null || true)
gpu_tests=$(grep -rlE 'mark\.gpu' tests --include='test_*.py' | grep -v '^tests/faults/' || true)
fault_tests=$(grep -rlE 'mark\.gpu' tests/faults --include='test_*.py' || true) # alone: one takes all GPU memory
failed=0
trap 'exit 130' INT # pytest ends by itself then, and some shells would go on with the next ones
tests() { "$PYTHON" -m pytest -q -p no:cacheprovider "$@" || [ $? -eq 5 ] || failed=1; } # 5: `-k` leaves none
# shellcheck disable=SC2086
tests $kernel_tests "$@"
# shellcheck disable=SC2086
[ -z "$gpu_tests" ] || tests -m gpu $gpu_tests "$@"
# shellcheck disable=SC2086
[ -z "$fault_tests" ] || tests -m gpu $fault_tests "$@"
exit $failed
