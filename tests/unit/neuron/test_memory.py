"""Device memory through libnrt's C interface, spoken to a library that implements it over host memory.

The shim has the prototypes of ``nrt/nrt.h``; what it cannot show is that Neuron hardware behaves like it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvduplex_neuron.memory import NeuronRuntime
from kvduplex_transfer.errors import BackendUnavailableError
from kvduplex_transfer.interface import MemoryType

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")

SHIM = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef int NRT_STATUS;
typedef struct { size_t size; int core; char *bytes; } nrt_tensor_t;
static int started, live;
int shim_live(void) { return live; }
NRT_STATUS nrt_init(int framework, const char *fw, const char *fal) {
    if (framework != 1 || !fw || !fal) return 2;
    if (!getenv("NEURON_RT_MAP_HBM")) return 3;
    if (!getenv("NEURON_RT_NUM_CORES") && !getenv("NEURON_RT_VISIBLE_CORES")) return 4; /* would reserve every core */
    started = 1;
    return getenv("SHIM_NO_CORES") ? 13 : 0;
}
void nrt_close(void) { started = 0; }
NRT_STATUS nrt_tensor_allocate(int placement, int vnc, size_t size, const char *name, nrt_tensor_t **out) {
    if (!started || placement != 0 || vnc > 1 || size > (1u << 20)) return 4;
    nrt_tensor_t *t = malloc(sizeof *t);
    t->size = size; t->core = vnc; t->bytes = calloc(1, size);
    live++;
    *out = t;
    return 0;
}
void nrt_tensor_free(nrt_tensor_t **t) { free((*t)->bytes); free(*t); *t = 0; live--; }
void *nrt_tensor_get_va(const nrt_tensor_t *t) { return getenv("SHIM_NO_VA") ? 0 : t->bytes; }
NRT_STATUS nrt_tensor_write(nrt_tensor_t *t, const void *buf, size_t offset, size_t size) {
    if (offset + size > t->size) return 2;
    memcpy(t->bytes + offset, buf, size);
    return 0;
}
NRT_STATUS nrt_tensor_read(const nrt_tensor_t *t, void *buf, size_t offset, size_t size) {
    if (offset + size > t->size) return 2;
    memcpy(buf, t->bytes + offset, size);
    return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("nrt")
    source = folder / "nrt.c"
    source.write_text(SHIM)
    path = folder / "libnrt.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, source], check=True)
    return str(path)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the runtime's variables; what it sets is undone."""
    for name in ("NEURON_RT_MAP_HBM", "NEURON_RT_NUM_CORES", "NEURON_RT_VISIBLE_CORES"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def runtime(library: str) -> NeuronRuntime:
    return NeuronRuntime(library)


def test_bytes_come_back_and_the_region_says_where_they_lie(runtime: NeuronRuntime) -> None:
    buffer = runtime.allocate(4096, device_id=1)
    assert (buffer.region.length, buffer.region.device_id, buffer.region.memory_type) == (4096, 1, MemoryType.VRAM)
    assert buffer.region.address
    buffer.write(b"kv" * 8, offset=16)
    assert buffer.read(16, offset=16) == b"kv" * 8
    buffer.close()


def test_closing_frees_once(runtime: NeuronRuntime, library: str) -> None:
    live = ctypes.CDLL(library).shim_live
    before = live()
    buffer = runtime.allocate(64)
    assert live() == before + 1
    buffer.close()
    buffer.close()
    assert live() == before
    with pytest.raises(ValueError, match="closed"):
        buffer.read(1)


def test_cores_that_were_chosen_stay(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4-7")
    NeuronRuntime(library)
    assert "NEURON_RT_NUM_CORES" not in os.environ


def test_hbm_is_mapped_before_the_runtime_starts(library: str) -> None:
    # The shim's getenv sees what os.environ puts into the process, as the runtime's does.
    NeuronRuntime(library).allocate(64).close()
    assert os.environ["NEURON_RT_MAP_HBM"] == "1"


def test_memory_without_an_address_is_refused(runtime: NeuronRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHIM_NO_VA", "1")
    with pytest.raises(BackendUnavailableError, match="NEURON_RT_MAP_HBM=1"):
        runtime.allocate(64)


def test_a_core_with_too_little_memory_is_named(runtime: NeuronRuntime) -> None:
    with pytest.raises(BackendUnavailableError, match="2097152 bytes on NeuronCore 0 answered NRT_STATUS 4"):
        runtime.allocate(2 << 20)


def test_no_free_core_is_said(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHIM_NO_CORES", "1")
    with pytest.raises(BackendUnavailableError, match="nrt_init answered NRT_STATUS 13; `neuron-ls`"):
        NeuronRuntime(library)


def test_a_missing_library_is_said(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="/opt/aws/neuron/lib"):
        NeuronRuntime(str(tmp_path / "libnrt.so.1"))
