"""The router is told how long decode engines keep blocks, and never uses a reference later."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvduplex_router.errors import ConfigError
from kvduplex_router.flags import config_from_argv

ENGINES = ["--prefill", "http://127.0.0.1:8100", "--decode", "http://127.0.0.1:8200"]


def test_references_end_before_the_engines_blocks_do() -> None:
    conversations = config_from_argv([*ENGINES, "--decoder-kv-blocks-ttl", "16"]).conversations
    assert (conversations.decoder_kv_blocks_ttl_s, conversations.usable_s) == (16, 15)
    assert config_from_argv(ENGINES).conversations.usable_s == 450


def test_the_flag_keeps_the_rest_of_the_files_section(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("conversations: {max_count: 7, decoder_kv_blocks_ttl_s: 100}\n")
    conversations = config_from_argv(["--config", str(file), *ENGINES, "--decoder-kv-blocks-ttl", "16"]).conversations
    assert (conversations.max_count, conversations.usable_s) == (7, 15)


def test_a_file_that_outlives_the_engines_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("conversations: {reference_ttl_s: 90}\n")
    with pytest.raises(ConfigError, match="reference_ttl_s 90 must be below decoder_kv_blocks_ttl_s 60"):
        config_from_argv(["--config", str(file), *ENGINES, "--decoder-kv-blocks-ttl", "60"])
