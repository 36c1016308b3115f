#!/usr/bin/env bash
# Every test, in the environment of run_pipeline.sh. Arguments go to pytest: tests/run.sh -m "not vllm"
set -euo pipefail
cd "$(dirname "$0")/.."
EXTRA_REQUIREMENTS=(requirements-test.txt)
source ./environment.sh

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
exec "$PYTHON" -m pytest -q "$@"
