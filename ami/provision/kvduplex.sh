#!/usr/bin/env bash
# Layer "kvduplex": the virtual environment, kvduplex itself, services, the image manifest.
#
# Python packages come by checksum from requirements.txt of the bundle: from its wheels folder, or from PACKAGE_INDEX.
# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
begin kvduplex
need FLAVOUR "neuron, cuda or cpu"
need IMAGE_VERSION "the version of the image"
readonly VENV=$PREFIX/venv
ENGINE_PYTHON=${ENGINE_PYTHON:-$VENV/bin/python}

pip_options=(--disable-pip-version-check --no-input --no-deps --quiet)
if [ -d "$BUNDLE/wheels" ]; then
  pip_options+=(--no-index --find-links "$BUNDLE/wheels")
elif [ -n "${PACKAGE_INDEX:-}" ]; then
  pip_options+=(--index-url "$PACKAGE_INDEX")
fi

# The stamp names everything that decides the content, so that a second run does nothing and a changed pin does.
stamp_of() { # stamp_of PYTHON REQUIREMENTS
  { "$1" --version; cat "$2" "$BUNDLE/SHA256SUMS"; } | sha256sum | cut -d' ' -f1
}

install_into() { # install_into PYTHON REQUIREMENTS STAMP-FILE
  local wanted wheel
  wanted=$(stamp_of "$1" "$2")
  [ "$(cat "$3" 2>/dev/null)" = "$wanted" ] && return
  say "installing $(grep -c -- --hash= "$2") packages into $1"
  "$1" -m pip install "${pip_options[@]}" --require-hashes -r "$2" || die "packages of $2 could not be installed into $1"
  for wheel in "$BUNDLE"/kvduplex-*.whl; do
    "$1" -m pip install "${pip_options[@]}" --force-reinstall "$wheel" || die "$wheel could not be installed into $1"
  done
  "$1" -c 'import kvduplex' || die "kvduplex does not import in $1"
  echo "$wanted" >"$3"
  changed=$((changed + 1))
}

(cd "$BUNDLE" && sha256sum --check --quiet --strict SHA256SUMS) || die "the bundle $BUNDLE was altered; build it again"
[ -x "$VENV/bin/python" ] || python3 -m venv "$VENV"
install_into "$VENV/bin/python" "$BUNDLE/requirements.txt" "$VENV/.kvduplex-stamp"
if [ "$ENGINE_PYTHON" != "$VENV/bin/python" ]; then
  case $ENGINE_PYTHON in "$PREFIX"/*/bin/python) [ -x "$ENGINE_PYTHON" ] || python3 -m venv "${ENGINE_PYTHON%/bin/python}" ;; esac
  [ -f "$BUNDLE/engine-requirements.txt" ] || die "the bundle has no engine-requirements.txt for $ENGINE_PYTHON; name it in the image recipe (engine.requirements)"
  install_into "$ENGINE_PYTHON" "$BUNDLE/engine-requirements.txt" "$PREFIX/engine.stamp"
fi
"$ENGINE_PYTHON" -c 'import importlib.util, sys; sys.exit(any(importlib.util.find_spec(m) is None for m in ("vllm", "nixl")))' ||
  die "$ENGINE_PYTHON lacks vllm or nixl; add them to the requirements of the image recipe"
[ "$(readlink /usr/local/bin/kvduplex)" = "$VENV/bin/kvduplex" ] || ln -sfn "$VENV/bin/kvduplex" /usr/local/bin/kvduplex

for unit in "$BUNDLE"/systemd/*.service; do
  copy_file "$unit" "/usr/lib/systemd/system/$(basename "$unit")" 0644
done
copy_file "$BUNDLE/files/logrotate" /etc/logrotate.d/kvduplex 0644
copy_file "$BUNDLE/files/profile.sh" /etc/profile.d/kvduplex.sh 0644
for unit in kvduplex-doctor.service kvduplex-node.service kvduplex-agent.service kvduplex-cloudwatch.service \
  kvduplex-neuron-monitor.service; do
  systemctl is-enabled --quiet "$unit" 2>/dev/null || {
    systemctl enable --quiet "$unit"
    changed=$((changed + 1))
  }
done

manifest=$(mktemp)
"$VENV/bin/python" "$BUNDLE/provision/manifest.py" --bundle "$BUNDLE" --flavour "$FLAVOUR" --version "$IMAGE_VERSION" \
  --parent "${PARENT_IMAGE:-}" --engine-python "$ENGINE_PYTHON" >"$manifest"
copy_file "$manifest" /usr/share/kvduplex/manifest.json 0644
rm -f "$manifest"
end
