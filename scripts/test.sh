#!/usr/bin/env bash
# Checks everything: format, lint, types and tests. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment dev,heif,parquet
install_fashion_mnist
install_chromium

ruff format --check .
ruff check .
mypy
python -m pytest "$@"
