#!/usr/bin/env bash
# Run layers of an unpacked bundle with its settings: run.sh LAYER...
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -gt 0 ] || { echo "usage: run.sh LAYER... (base, efa, cloudwatch, neuron, cuda, cpu, kvduplex, seal)" >&2; exit 2; }
set -a
# shellcheck disable=SC1091
. "$here/../settings.env"
set +a
for layer in "$@"; do
  case $layer in
  base | efa | cloudwatch | neuron | cuda | cpu | kvduplex | seal) "$here/$layer.sh" ;;
  *) echo "run.sh: no layer '$layer'; there are base, efa, cloudwatch, neuron, cuda, cpu, kvduplex, seal" >&2; exit 2 ;;
  esac
done
