#!/usr/bin/env bash
# Build the CUDA stub libraries into a folder: build.sh FOLDER
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:?usage: build.sh FOLDER}
# The plugin asks for the runtime's functions by the symbol version that NVIDIA's library gives them.
version=$(mktemp)
trap 'rm -f "$version"' EXIT
echo 'libcudart.so.12 { global: cuda*; local: *; };' >"$version"
# shellcheck disable=SC2054
flags=(-shared -fPIC -O1 -Wall -Werror -Wl,--build-id=none -Wl,-z,now)
gcc "${flags[@]}" -DSTUB_DRIVER -Wl,-soname,libcuda.so.1 -o "$out/libcuda.so.1" "$here/stub.c"
gcc "${flags[@]}" -Wl,-soname,libcudart.so.12 -Wl,--version-script="$version" -o "$out/libcudart.so.12" "$here/stub.c"
