#!/usr/bin/env bash
# Adds what the CDK app and its tests need to the virtual environment: pinned Python packages, and the CDK's command
# line from npm into .cache/cdk. Returns at once when both are up to date.
#
#   .make/setup-infra.sh VENV
set -euo pipefail
venv=$1
cdk_version=2.1148.1
lock=.make/locks/infra.txt
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() { printf 'setup-infra: %s\n' "$*" >&2; exit 2; }

command -v node >/dev/null && command -v npm >/dev/null ||
  die "no Node.js: the CDK runs on it; install version 20 or newer with npm (Debian: apt-get install nodejs npm)"

exec 9<Makefile
flock -w 900 9 || die "another setup has held Makefile for 15 minutes; end it and try again"
stamp=$(cat "$lock" "$0" "$venv/.kvduplex-stamp" | sha256sum | cut -c1-16)
if [ "$(cat "$venv/.kvduplex-infra-stamp" 2>/dev/null)" != "$stamp" ]; then
  echo "setup-infra: $(grep -c '==' "$lock") packages of $lock"
  "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps -r "$lock" 2>&1 |
    { grep -v '^WARNING: Location' >&2 || true; }
  "$venv/bin/python" -c 'import importlib.util as u; raise SystemExit(not u.find_spec("aws_cdk"))' ||
    die "packages of $lock could not be installed; the lines above say which"
  echo "$stamp" >"$venv/.kvduplex-infra-stamp"
fi
if [ "$(sed -n 's/.*"version": "\(.*\)".*/\1/p' .cache/cdk/node_modules/aws-cdk/package.json 2>/dev/null | head -1)" != "$cdk_version" ]; then
  echo "setup-infra: aws-cdk $cdk_version into .cache/cdk"
  mkdir -p .cache/cdk
  npm install --silent --no-audit --no-fund --prefix .cache/cdk "aws-cdk@$cdk_version" ||
    die "aws-cdk $cdk_version could not be installed from npm"
fi
