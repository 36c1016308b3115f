#!/usr/bin/env bash
# Every test, in the environment of run_pipeline.sh. Arguments go to pytest: tests/run.sh -m "not vllm"
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # called as `sh tests/run.sh`
set +o posix -euo pipefail
unset CDPATH # with it, cd prints and may go elsewhere
cd -P -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.."
source ./environment.sh
make_environment requirements-test.txt

# The project's own files: a scratch file in the root is its user's matter.
sources=(drafter tests benchmarks 0[1-6]*_*.py)
"$PYTHON" -m ruff check "${sources[@]}"
"$PYTHON" -m ruff format --check "${sources[@]}"
"$PYTHON" -m mypy
if (($#)); then exec "$PYTHON" -m pytest -q "$@"; fi
"$PYTHON" -m drafter.target.default_model > /dev/null # once, before both sorts of tests want it

# Tests that wait for a vLLM server leave room for the others beside them: two workers, which share the rest evenly.
log=$(mktemp)
set -m # a process group of its own: a background job would ignore Ctrl-C, and is told by the trap instead
"$PYTHON" -m pytest -q --durations=20 -m vllm > "$log" 2>&1 &
served=$!
set +m
trap 'kill -INT -- "-$served" 2>/dev/null || true; rm -f "$log"' EXIT
failed=0
"$PYTHON" -m pytest -q --durations=20 -n 2 --dist worksteal -m "not vllm" || failed=$?
wait "$served" || failed=$?
cat "$log"
exit "$failed"
