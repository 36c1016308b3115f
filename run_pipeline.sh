#!/usr/bin/env bash
# From prompts to a measured drafter.
#
#   ./run_pipeline.sh [CONFIG] [--from NN | --only NN] [--limit N] [--deadline HH:MM] [--redo] [--set SECTION.KEY=VALUE]
#   ./run_pipeline.sh [CONFIG] --dry-run, --rehearse, --plan [--probe] [--done-by HH:MM], or status
#
# First, once for a warm start that was never served here, a smoke test: vLLM must accept some of its drafts (05 --smoke).
# Then these stages in order; a stage with nothing left to do is skipped:
#   01b  the role `generate` comes up; every prompt is answered; the role goes down
#   02   the role `extract` comes up; the answers are read back as hidden states; the role goes down
#   04   the drafter is trained on them (torchrun)
#   05   the best checkpoint becomes a folder that vLLM serves
#   06   vLLM serves it, the role `evaluate` once per drafter; acceptance is measured
# In every case the servers that were started here are stopped, and systemd units that were active before are started again.
# The exit code is that of the stage that failed; the same command continues there.
#
# PYTHON=python3 ./run_pipeline.sh uses that interpreter and its packages instead of making .venv.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # if called as `sh run_pipeline.sh`
set +o posix -euo pipefail
unset CDPATH # makes cd print and may lead elsewhere
caller=$PWD
if [[ ${PYTHON:-} == */* && $PYTHON != /* ]]; then PYTHON=$caller/$PYTHON; fi
cd -P -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
source ./environment.sh
# An empty entry would mean the caller's folder.
others=":${PYTHONPATH:-}:"
while [[ $others == *::* ]]; do others=${others//::/:}; done
export PYTHONPATH=$PWD${others%:}
if [[ -n ${PYTHON:-} ]] &&
  ! "$PYTHON" -c 'import importlib.util, pydantic, yaml; assert importlib.util.find_spec("torch")' >/dev/null 2>&1; then
  echo "run_pipeline.sh: PYTHON=$PYTHON is not an interpreter with the packages of requirements.txt" >&2
  exit 2
fi
# --help and wrong arguments are answered before anything is installed.
any=${PYTHON:-$(find_python)}
answer=$(cd -- "$caller" && "$any" -P -m drafter.cli "$@") && code=0 || code=$?
if [[ -n $answer || $code != 0 ]]; then
  [[ -z $answer ]] || printf '%s\n' "$answer"
  exit "$code"
fi
if [[ -z ${PYTHON:-} && ! -e .venv/.installed && " $* " == *" status "* ]]; then
  echo "run_pipeline.sh: status needs the packages, which are not installed in .venv yet; $PYTHON_HINT" >&2
  exit 2
fi
make_environment
cd -- "$caller"
exec "$PYTHON" -P -m drafter.pipeline "$@" # -P: never import modules from the caller's folder
