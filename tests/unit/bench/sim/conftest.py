"""Timing with round numbers, the generated tokenizer, and engines on free ports."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from kvduplex_bench.sim.core.timing import Decode, Prefill, Reuse, Timing, Transfer
from kvduplex_bench.sim.settings import Connector, EngineAddress, EngineSettings, Role

MakeSettings = Callable[..., EngineSettings]


@pytest.fixture(scope="session")
def timing() -> Timing:
    """A step costs 1 s, a prompt token 10 ms, a generated token of a sequence 100 ms, a moved token 1 ms."""
    return Timing(
        name="round", about="for tests", model="m", max_model_len=4096, block_size=4, kv_blocks=64,
        kv_bytes_per_token=1, max_num_seqs=4, max_num_batched_tokens=16,
        prefill=Prefill(step_s=1.0, per_token_s=0.01, source=""),
        decode=Decode(step_s=0.5, per_sequence_s=0.1, source=""),
        forward=Transfer(setup_s=0.1, per_token_s=0.001, source=""),
        back=Transfer(setup_s=0.2, per_token_s=0.001, source=""),
        reuse=Reuse(step_s=0.25, source=""),
    )  # fmt: skip


@pytest.fixture
def make_settings(timing: Timing, tokenizer: Path) -> MakeSettings:
    """Settings of a fast engine with 32-token blocks on free ports."""

    def make(role: Role = Role.REPLICA, connector: Connector = Connector.LEASED, **changes: object) -> EngineSettings:
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(4)]
            for one in sockets:
                one.bind(("127.0.0.1", 0))
            address = EngineAddress("127.0.0.1", *(one.getsockname()[1] for one in sockets))
        fast = msgspec.structs.replace(
            timing, model="tiny", block_size=32, max_num_batched_tokens=2048,
            **{"kv_blocks": 512, "max_num_seqs": 16, **changes},
        )  # fmt: skip
        return EngineSettings(
            role=role, address=address, timing=fast, tokenizer=tokenizer, time_scale=0.001, connector=connector
        )

    return make
