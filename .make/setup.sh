#!/usr/bin/env bash
# Makes the virtual environment that every make target uses, or returns at once when it is up to date.
#
#   .make/setup.sh VENV engine|base|any
#
# "engine" holds everything, vLLM's CPU build included; "base" leaves the engine out, which is enough for the fast suite;
# "any" brings up to date what is there, and makes the base when nothing is.
# PYTHON names the interpreter; TORCH_INDEX an index of PyTorch CPU wheels, where the configured ones have none.
set -euo pipefail
venv=$1 kind=$2
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"

die() { printf 'setup: %s\n' "$*" >&2; exit 2; }

# Two makes at once must not write one environment; the kernel drops this lock with the process.
exec 9<Makefile
flock -w 900 9 || die "another setup has held $here/Makefile for 15 minutes; end it and try again"

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$candidate"; return; fi
  done
  die "no Python 3.11 or newer (looked for: ${PYTHON:-python3.11 python3.12 python3}); name one: make PYTHON=/path/to/python3.11 ..."
}

python=$(find_python)
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ "$kind" = any ]; then
  case $(cat "$venv/.kvduplex-stamp" 2>/dev/null) in *-engine-*) kind=engine ;; *) kind=base ;; esac
fi
locks=(.make/locks/base.txt)
[ "$kind" = base ] || locks+=(.make/locks/engine-cpu.txt)
stamp=$(cat "${locks[@]}" pyproject.toml "$0" | sha256sum | cut -c1-16)-$kind-$version
if [ "$(cat "$venv/.kvduplex-stamp" 2>/dev/null)" = "$stamp" ] && "$venv/bin/python" -c 'import kvduplex' 2>/dev/null; then exit 0; fi

[ "$kind" = base ] || command -v gcc >/dev/null || die "no C compiler: the engine builds helpers at start; install gcc (Debian: apt-get install gcc)"
started=$(date +%s)
echo "setup: making $venv ($kind) with $("$python" --version)"
[ -x "$venv/bin/python" ] && [ "$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = "$version" ] || "$python" -m venv --clear "$venv"

# Pins are complete, so nothing is resolved: that is faster, and keeps torchvision, torchaudio and torchcodec out, whose
# newest builds do not load beside the CPU build of torch ("operator torchvision::nms does not exist").
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
install() {
  local log
  log=$(mktemp)
  if ! pip install --quiet --no-deps "$@" >"$log" 2>&1; then
    grep -v '^WARNING: Location' "$log" >&2 || true
    rm -f "$log"
    return 1
  fi
  rm -f "$log"
}
if [ "$kind" != base ]; then
  torch=$(grep '^torch==' .make/locks/engine-cpu.txt)
  echo "setup: $torch"
  install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch" ||
    die "$torch is not in the configured package index. Set TORCH_INDEX to PyTorch's index of CPU wheels (it stands on PyTorch's 'Get started' page, under Compute Platform: CPU): make setup TORCH_INDEX=https://..."
fi
for lock in "${locks[@]}"; do
  echo "setup: $(grep -c '==' "$lock") packages of $lock"
  install -r <(grep -v '^torch==' "$lock") || die "packages of $lock could not be installed; the lines above say which"
done
clash=$("$venv/bin/python" - <<'PY'
from importlib.metadata import distributions
print(" ".join(sorted({d.metadata["Name"] for d in distributions()} & {"torchvision", "torchaudio", "torchcodec"})))
PY
)
# shellcheck disable=SC2086
[ -z "$clash" ] || pip uninstall --quiet --yes $clash
install --no-build-isolation --editable . || die "kvduplex itself could not be installed"
"$venv/bin/python" -c 'import kvduplex'
echo "$stamp" >"$venv/.kvduplex-stamp"
echo "setup: done in $(($(date +%s) - started)) s"
