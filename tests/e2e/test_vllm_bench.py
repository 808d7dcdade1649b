"""vLLM's own benchmark client, unchanged, through the router."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.conftest import running
from tests.e2e.leased_pair import tiny_model
from tests.e2e.rig import Rig

REQUESTS = 12

# The command `vllm` asks for the metadata of a distribution called vllm, which the CPU build is not.
PROGRAM = """
from argparse import ArgumentParser
from vllm.benchmarks.serve import add_cli_args, main
parser = ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def leased() -> Iterator[Rig]:
    with running("leased") as rig:
        yield rig


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_every_request_succeeds(leased: Rig, tmp_path: Path, backend: str, endpoint: str) -> None:
    options = {
        "backend": backend,
        "endpoint": endpoint,
        "base-url": leased.cluster.url,
        "model": leased.router.model,
        "tokenizer": str(tiny_model()),
        "dataset-name": "random",
        "random-input-len": "200",
        "random-output-len": "16",
        "num-prompts": str(REQUESTS),
        "max-concurrency": "4",
        "result-dir": str(tmp_path),
        "result-filename": "result.json",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-c", PROGRAM, *flags, "--save-result", "--ignore-eos", "--disable-tqdm"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == 16 * REQUESTS
