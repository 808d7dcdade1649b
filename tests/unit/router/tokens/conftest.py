"""The generated model's tokenizer files, and variants of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def variant(model: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the model folder with other settings or another template file."""

    def make(template_file: str | None = None, **settings: Any) -> Path:
        config = json.loads((model / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, **settings}))
        if template_file is not None:
            (tmp_path / "chat_template.jinja").write_text(template_file)
        return tmp_path

    return make
