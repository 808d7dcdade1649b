#!/usr/bin/env bash
# Environments with an accelerator's engine. They are the vendor's or made by hand-picked extras, so nothing here is pinned.
#
#   .make/accelerator.sh find neuron|gpu ENVIRONMENT FALLBACK   prints the folder of the `kvduplex` to run
#   .make/accelerator.sh make neuron|gpu ENVIRONMENT            puts kvduplex (and, on gpu, the engine) into it
#
# "find" never installs an engine: where ENVIRONMENT is missing it falls back on one that can at least say what this host
# lacks, because that answer must not wait for gigabytes of wheels.
set -euo pipefail
cd "$(dirname "$0")/.."
verb=$1 kind=$2 env=$3

die() { printf 'setup: %s\n' "$*" >&2; exit 2; }
has() { [ -x "$env/bin/python" ] && "$env/bin/python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)" 2>/dev/null; }

find_it() {
  if has kvduplex; then echo "$env/bin"; return; fi
  if has vllm; then die "$env has vLLM but not kvduplex; run: make setup-$kind"; fi
  .make/setup.sh "$1" any >&2
  echo "$1/bin"
}

make_it() {
  if [ "$kind" = neuron ]; then
    # vLLM for Neuron, its framework and its compiler come from the DLAMI or Neuron's own repository, never from here.
    has vllm || die "$env has no vLLM for Neuron. Use a Neuron DLAMI (its environments are in /opt), or name another: make setup-neuron NEURON_VENV=/path"
    extras='router,bench,hardware'
  else
    [ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
    extras='router,bench,hardware,engine-gpu'
  fi
  # Its own versions stay: a constraint on everything installed lets pip add packages, and change none.
  "$env/bin/python" -m pip --disable-pip-version-check install --quiet \
    --constraint <("$env/bin/python" -m pip freeze --all --exclude-editable | grep -E '^[A-Za-z0-9._-]+==') --editable ".[$extras]"
  echo "setup: kvduplex is in $env"
}

case $verb in
  find) find_it "$4" ;;
  make) make_it ;;
  *) die "unknown verb $verb" ;;
esac
