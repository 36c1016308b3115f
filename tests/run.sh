#!/usr/bin/env bash
# Every test, in the environment of run_pipeline.sh. Arguments go to pytest: tests/run.sh -m "not vllm"
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # called as `sh tests/run.sh`
set +o posix -euo pipefail
unset CDPATH # with it, cd prints and may go elsewhere
cd -P -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.."
source ./environment.sh
make_environment requirements-test.txt

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
if (($#)); then exec "$PYTHON" -m pytest -q "$@"; fi
"$PYTHON" -m drafter.target.default_model > /dev/null # once, before both sorts of tests want it

# Tests that wait for a vLLM server leave room for the others beside them.
log=$(mktemp)
set -m # a process group of its own: a background job would ignore Ctrl-C, and is told by the trap instead
"$PYTHON" -m pytest -q -m vllm > "$log" 2>&1 &
served=$!
set +m
trap 'kill -INT -- "-$served" 2>/dev/null || true; rm -f "$log"' EXIT
failed=0
"$PYTHON" -m pytest -q -m "not vllm" || failed=$?
wait "$served" || failed=$?
cat "$log"
exit "$failed"
