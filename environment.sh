# Sourced by run_pipeline.sh and tests/run.sh from the project's root, for make_environment, which exports
#   PYTHON  an interpreter that has the requirements: the caller's own (PYTHON=python3 ./run_pipeline.sh),
#           else .venv, which is made once and again only when a requirements file changes
# shellcheck shell=bash

find_python() {  # the first interpreter that is new enough and can make an environment
  local candidate
  for candidate in python3.12 python3.11 python3 python; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  echo "no Python 3.11 or newer with the venv module (Debian: apt install python3 python3-venv)" >&2
  return 2
}

install_into() {  # install_into VENV LIST...: a list named *-nodeps.txt names everything it needs itself
  local venv=$1 list options
  shift
  for list in "$@"; do
    options=(); [[ $list == *-nodeps.txt ]] && options=(--no-deps)
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${options[@]}" -r "$list" || return
  done
}

make_environment() {  # make_environment [LIST...]: .venv with the machine's requirements and these besides
  [[ -z ${PYTHON:-} ]] || return 0
  local lists stamp python
  if nvidia-smi -L >/dev/null 2>&1; then lists=(requirements.txt requirements-nodeps.txt); else lists=(requirements-cpu.txt requirements-cpu-nodeps.txt); fi
  lists+=("$@")
  mkdir -p .venv || return
  exec 9> .venv/.lock
  flock 9 || return # two commands at once would install into each other
  for list in "${lists[@]}"; do
    stamp=$(sha256sum "$list")
    grep -qsxF "$stamp" .venv/.installed && continue
    if [[ ! -x .venv/bin/python ]]; then
      python=$(find_python) || return
      echo "making .venv with $python; the first installation takes some minutes" >&2
      "$python" -m venv .venv || return
    fi
    install_into .venv "$list" || return
    # Only a finished installation is remembered; an interrupted one is taken up again.
    sed -i "\|  $list\$|d" .venv/.installed 2>/dev/null || true
    echo "$stamp" >> .venv/.installed
  done
  exec 9>&-
  export PYTHON=$PWD/.venv/bin/python
}
