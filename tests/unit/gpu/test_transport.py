"""Which transport the GPU backend uses when nobody says."""

from __future__ import annotations

import pytest

from kvduplex_gpu.backend import GpuBackend
from kvduplex_gpu.options import Transport
from kvduplex_transfer.errors import ConfigError


@pytest.mark.parametrize(("value", "plugin"), [(None, "LIBFABRIC"), ("efa", "LIBFABRIC"), ("ucx", "UCX")])
def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch, value: str | None, plugin: str) -> None:
    monkeypatch.delenv("KVDUPLEX_GPU_TRANSPORT", raising=False)
    if value is not None:
        monkeypatch.setenv("KVDUPLEX_GPU_TRANSPORT", value)
    assert set(GpuBackend().nixl_settings().backends) == {plugin}


def test_an_argument_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVDUPLEX_GPU_TRANSPORT", "ucx")
    assert set(GpuBackend(transport=Transport.EFA).nixl_settings().backends) == {"LIBFABRIC"}


def test_an_unknown_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVDUPLEX_GPU_TRANSPORT", "tcp")
    with pytest.raises(ConfigError, match="KVDUPLEX_GPU_TRANSPORT=tcp: unknown transport; set it to efa or ucx"):
        GpuBackend()
