#!/usr/bin/env bash
# Layer "cpu": nothing but a check; vLLM's CPU build is Python packages, which layer "kvduplex" installs.
# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
begin cpu

[ "$(uname -m)" = x86_64 ] || die "machine type $(uname -m): the CPU wheels of vLLM that images pin are for x86_64"
grep -qw avx2 /proc/cpuinfo || die "this CPU has no AVX2, which vLLM's CPU build needs (vLLM documentation, CPU installation)"
end
