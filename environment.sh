# Sourced by run_pipeline.sh and tests/run.sh from the project's root, for make_environment, which exports
#   PYTHON  an interpreter that has the requirements: the caller's own (PYTHON=python3 ./run_pipeline.sh),
#           else .venv, which is made again only when a requirements file or its interpreter changes
# shellcheck shell=bash

PYTHON_HINT="or name an interpreter that has the packages of requirements.txt: PYTHON=python3 $0"

find_python() {  # print the first interpreter that is new enough and can create an environment
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

venv_runs() {  # .venv works, and its packages belong to its Python
  .venv/bin/python -c '
import os, sys
version = "python%d.%d" % sys.version_info[:2]
sys.exit(sys.version_info < (3, 11) or not os.path.isdir(os.path.join(sys.prefix, "lib", version, "site-packages/pip")))
' >/dev/null 2>&1
}

missing_lists() {  # missing_lists LIST...: print those that are not installed in their current version
  local list
  for list in "$@"; do
    grep -qsxF "$(sha256sum "$list")" .venv/.installed || echo "$list"
  done
}

check_folder() {  # .venv is writable and on a file system that runs programs
  local probe=.venv/.probe
  if ! { mkdir -p .venv && printf '#!/bin/sh\n' > "$probe" && chmod +x "$probe"; } 2>/dev/null; then
    echo "$0: $PWD/.venv cannot be written: make it writable, $PYTHON_HINT" >&2
    return 2
  fi
  if ! "$probe" 2>/dev/null; then
    rm -f "$probe"
    echo "$0: $PWD is on a file system that runs no programs (noexec): move the project, $PYTHON_HINT" >&2
    return 2
  fi
  rm -f "$probe"
}

repair_venv() {  # remove a .venv of another Python; rewrite the paths of one that was moved
  [[ -e .venv/bin || -L .venv/bin/python ]] || { rm -f .venv/.installed; return 0; }
  if ! venv_runs; then
    if [[ ! -f .venv/.installed ]]; then
      echo "$0: $PWD/.venv does not work and was not made here: remove it, $PYTHON_HINT" >&2
      return 2
    fi
    echo "removing .venv: its Python is gone or was replaced" >&2
    rm -rf .venv/bin .venv/lib .venv/lib64 .venv/include .venv/pyvenv.cfg .venv/.installed
  elif ! grep -qsF "$PWD/.venv" .venv/bin/activate; then
    echo ".venv was moved: rewriting the paths in its programs" >&2
    .venv/bin/python -m venv --without-pip .venv || return
    find .venv/bin -type f -exec sed -i "1s|^#!/.*/\.venv/bin/python|#!$PWD/.venv/bin/python|" {} +
  fi
}

install_into() {  # install_into VENV LIST...; a list named *-nodeps.txt is installed without dependencies
  local venv=$1 list options
  shift
  for list in "$@"; do
    options=(); [[ $list == *-nodeps.txt ]] && options=(--no-deps)
    # Only errors: the lists without dependencies leave out, on purpose, what pip would miss and warn of.
    "$venv/bin/python" -m pip install -qq --no-warn-conflicts --disable-pip-version-check "${options[@]}" -r "$list" || return
  done
}

make_environment() {  # make_environment [LIST...]: .venv with the requirements for this machine and these lists
  [[ -z ${PYTHON:-} ]] || return 0
  local lists list python
  if nvidia-smi -L >/dev/null 2>&1; then lists=(requirements.txt requirements-nodeps.txt); else lists=(requirements-cpu.txt requirements-cpu-nodeps.txt); fi
  lists+=("$@")
  # A complete .venv needs neither a lock nor a writable folder.
  if [[ -n $(missing_lists "${lists[@]}") ]] || ! venv_runs || ! grep -qsF "$PWD/.venv" .venv/bin/activate; then
    check_folder || return
    exec 9> .venv/.lock
    flock 9 || return # two commands must not install at the same time
    repair_venv || return
    for list in $(missing_lists "${lists[@]}"); do
      if [[ ! -x .venv/bin/python ]]; then
        python=$(find_python) || return
        echo "creating .venv with $python; the first installation takes a few minutes (2.6 GB on a CPU)" >&2
        "$python" -m venv .venv || return
      fi
      install_into .venv "$list" || return
      # Record only a finished installation, so that an interrupted one is continued.
      sed -i "\|  $list\$|d" .venv/.installed 2>/dev/null || true
      sha256sum "$list" >> .venv/.installed
    done
    exec 9>&-
  fi
  export PYTHON=$PWD/.venv/bin/python
}
