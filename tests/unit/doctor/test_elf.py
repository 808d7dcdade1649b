"""The ELF reader against a real compiler's output, the installed NIXL plugin, and damaged files."""

from __future__ import annotations

import contextlib
import importlib.metadata
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvduplex_transfer.hostchecks.elf import ElfError, mentions_symbol, read_shared_library


def installed_plugin() -> Path | None:
    """The LIBFABRIC plugin of an installed nixl wheel."""
    for name in ("nixl-cu12", "nixl-cu13"):
        try:
            files = importlib.metadata.distribution(name).files or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == "libplugin_LIBFABRIC.so":
                return Path(str(file.locate()))
    return None


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_reads_what_a_compiler_and_linker_wrote(tmp_path: Path) -> None:
    (tmp_path / "fabric.c").write_text("int fi_one(void){return 1;} int fi_two(void){return 2;}")
    (tmp_path / "fabric.map").write_text(
        "FABRIC_1.0 { global: fi_one; local: *; };\nFABRIC_1.10 { global: fi_two; } FABRIC_1.0;"
    )
    (tmp_path / "user.c").write_text("int fi_one(void); int fi_two(void); int use(void){return fi_one()+fi_two();}")
    fabric, user = tmp_path / "libfabric.so.1", tmp_path / "user.so"
    common = ["gcc", "-shared", "-fPIC"]
    subprocess.run(
        [
            *common,
            "-Wl,-soname,libfabric.so.1",
            f"-Wl,--version-script={tmp_path}/fabric.map",
            "-o",
            fabric,
            tmp_path / "fabric.c",
        ],
        check=True,
    )
    subprocess.run([*common, "-Wl,-rpath,$ORIGIN/../lib", "-o", user, tmp_path / "user.c", fabric], check=True)
    provider, consumer = read_shared_library(fabric), read_shared_library(user)
    assert provider.provided_versions == {"FABRIC_1.0", "FABRIC_1.10"}
    assert "libfabric.so.1" in consumer.needed
    assert consumer.search_path == ("$ORIGIN/../lib",)
    assert consumer.required_versions["libfabric.so.1"] == {"FABRIC_1.0", "FABRIC_1.10"}
    assert mentions_symbol(fabric, "fi_two")
    assert not mentions_symbol(fabric, "fi_three")


@pytest.mark.skipif(installed_plugin() is None, reason="needs an installed nixl wheel")
def test_reads_the_installed_plugin() -> None:
    plugin = read_shared_library(installed_plugin() or Path())
    assert {"libfabric.so.1", "libcuda.so.1", "libhwloc.so.15"} <= set(plugin.needed)
    assert "FABRIC_1.0" in plugin.required_versions["libfabric.so.1"]
    assert plugin.search_path[0] == "$ORIGIN/.."


def test_reads_what_the_fixture_writer_wrote(library_file: Callable[..., Path]) -> None:
    path = library_file(
        needed=["a.so", "b.so"],
        requires={"a.so": ("V1", "V2"), "b.so": ("W",)},
        provides=("X", "Y"),
        base="me.so",
        strings=("sym",),
    )
    library = read_shared_library(path)
    assert library.needed == ("a.so", "b.so")
    assert dict(library.required_versions) == {"a.so": {"V1", "V2"}, "b.so": {"W"}}
    assert library.provided_versions == {"X", "Y"}
    assert mentions_symbol(path, "sym")


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"\x7fELF\x01\x01" + bytes(200), b"#!/bin/sh\n" * 50])
def test_refuses_what_is_no_library(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.so"
    path.write_bytes(content)
    with pytest.raises(ElfError, match=r"bad\.so"):
        read_shared_library(path)
    assert not mentions_symbol(path, "anything")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 400), position=st.integers(0, 600), value=st.integers(0, 255))
def test_damage_never_escapes_as_another_error(
    library_file: Callable[..., Path], tmp_path: Path, cut: int, position: int, value: int
) -> None:
    whole = library_file(needed=["a.so"], requires={"a.so": ("V1", "V2")}, provides=("X",), base="me.so").read_bytes()
    content = bytearray(whole[: len(whole) - cut])
    if position < len(content):
        content[position] = value
    path = tmp_path / "damaged.so"
    path.write_bytes(bytes(content))
    with contextlib.suppress(ElfError):
        read_shared_library(path)
