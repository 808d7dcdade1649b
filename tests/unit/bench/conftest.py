"""The generated tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvduplex.tinymodel.tokenizer import tokenizer_files, vocabulary


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with the generated tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    for name, content in tokenizer_files(vocabulary(), max_tokens=32_768).items():
        (folder / name).write_bytes(content)
    return folder
