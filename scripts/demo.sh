#!/usr/bin/env bash
# Shows the whole path on data that comes with scikit-learn: train, evaluate, predict a folder. Downloads nothing but
# the packages. Writes into demo/, a new run each time.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment ""

number=1
while [ -e "demo/run-$number" ]; do number=$((number + 1)); done
run=demo/run-$number

echo "== train a ViT on 1,797 scanned digits"
vitlab train --train.run_dir "$run"
echo "== score it once on the test split, which chose nothing"
vitlab evaluate "$run" --data digits --split test --json "$run/test.json"
echo "== predict a folder of images"
python scripts/write_digits.py --out demo/digits --count 12
vitlab predict "$run" demo/digits --out "$run/predictions.csv"
head -4 "$run/predictions.csv"

echo
echo "written:"
for file in "$run"/best.safetensors "$run"/config.yaml "$run"/results.png "$run"/confusion.png "$run"/train_batch.jpg \
    "$run"/test.json "$run"/predictions.csv; do
    echo "  $file"
done
echo "curves: .venv/bin/tensorboard --logdir $run"
