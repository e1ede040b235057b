#!/usr/bin/env bash
# At most five minutes on a machine with a GPU: the tests of parity and training there, and the benchmark's GPU part.
#
#     bash scripts/gpu_check.sh                    # figures into runs/gpu
#     DOCS=docs bash scripts/gpu_check.sh          # beside those of the processor that stand in docs already
#     DEVICE=cpu bash scripts/gpu_check.sh         # the same without a GPU, at tiny sizes, to see that it runs
#
# It takes the environment that is active, and writes performance.json, .md and .png.
set -uo pipefail
cd "$(dirname "$0")/.."
device=${DEVICE:-cuda}
docs=${DOCS:-runs/gpu}
export NO_ALBUMENTATIONS_UPDATE=1
status=0

# Tests marked `gpu` skip without one; the training tests take the GPU where there is one (`train.device auto`).
timeout 60 python -m pytest tests/models tests/data -m gpu || status=$?
timeout 45 python -m pytest tests/test_training.py -k "learns or same_seed or resumed_run_ends or score_of_the_log" \
    || status=$?

options=(--device cuda)
if [ "$device" = cpu ]; then
    options=(--quick --parts networks_bf16 networks_compiled pixels sampling)
fi
minutes=$(python -c "print((285 - $SECONDS) / 60)") # bash counts from the start
python scripts/benchmark.py "${options[@]}" --docs "$docs" --work runs/gpu/parts --minutes "$minutes" || status=$?
exit "$status"
