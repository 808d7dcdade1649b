"""Timing profiles: how long an engine of some model on some machine takes.

Every coefficient is a plain number of seconds or tokens with its source beside it, so that a result can be traced to
what was measured and what was assumed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec
import yaml
from msgspec import Meta

from kvduplex_bench.sim.errors import ProfileError

__all__ = ["PROFILES", "Decode", "Prefill", "Reuse", "Timing", "Transfer", "load_timing", "profile_names"]

PROFILES: Final = Path(__file__).parent.parent / "profiles"
"""Folder of the profiles that come with the package."""

_Seconds = Annotated[float, Meta(ge=0, le=3600)]
_Count = Annotated[int, Meta(ge=1, le=2**40)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Prefill(_Section, frozen=True, kw_only=True):
    """Computing prompt tokens.

    Attributes:
        step_s: Fixed part of a step that computes prompt tokens.
        per_token_s: Per token computed.
        per_token_context_s: Per token computed and token of context it attends to.
        source: Where the numbers come from.
    """

    step_s: _Seconds
    per_token_s: _Seconds
    per_token_context_s: _Seconds = 0.0
    source: str


class Decode(_Section, frozen=True, kw_only=True):
    """Generating tokens, one a step for each running sequence.

    Attributes:
        step_s: Fixed part of a step.
        per_sequence_s: Per running sequence.
        per_context_token_s: Per token of context of all running sequences together.
        source: Where the numbers come from.
    """

    step_s: _Seconds
    per_sequence_s: _Seconds = 0.0
    per_context_token_s: _Seconds = 0.0
    source: str


class Transfer(_Section, frozen=True, kw_only=True):
    """Moving KV in one direction.

    Attributes:
        setup_s: Per transfer.
        per_token_s: Per token moved.
        source: Where the numbers come from.
    """

    setup_s: _Seconds
    per_token_s: _Seconds
    source: str

    def seconds(self, tokens: int) -> float:
        """Time to move the KV of `tokens` tokens."""
        return self.setup_s + self.per_token_s * tokens if tokens else 0.0


class Reuse(_Section, frozen=True, kw_only=True):
    """What a prompt whose KV was pulled costs beyond the transfer and its own new tokens.

    Attributes:
        step_s: Per prompt.
        per_token_s: Per pulled token.
        source: Where the numbers come from.
    """

    step_s: _Seconds = 0.0
    per_token_s: _Seconds = 0.0
    source: str


class Timing(_Section, frozen=True, kw_only=True):
    """One engine.

    Attributes:
        name: Name of the profile.
        about: What it stands for, and what it does not.
        model: Model name the engine serves.
        max_model_len: Longest prompt and answer together, in tokens.
        block_size: Tokens of a KV block.
        kv_blocks: KV blocks an engine has.
        kv_bytes_per_token: Bytes of KV of one token.
        max_num_seqs: Sequences running at once.
        max_num_batched_tokens: Tokens computed in one step.
        prefill: Computing prompts.
        decode: Generating.
        forward: KV from a prefill to a decode engine.
        back: KV from a decode to a prefill engine.
        reuse: Further cost of pulled KV.
    """

    name: str
    about: str
    model: str
    max_model_len: _Count
    block_size: _Count
    kv_blocks: _Count
    kv_bytes_per_token: _Count
    max_num_seqs: _Count
    max_num_batched_tokens: _Count
    prefill: Prefill
    decode: Decode
    forward: Transfer
    back: Transfer
    reuse: Reuse

    def decode_step_s(self, sequences: int, context: float) -> float:
        """A step in which `sequences` sequences with `context` tokens of context in all generate a token each."""
        decode = self.decode
        return decode.step_s + decode.per_sequence_s * sequences + decode.per_context_token_s * context

    def prefill_step_s(self, tokens: int, attended: float, sequences: int, context: float) -> float:
        """A step that also computes prompt tokens.

        Args:
            tokens: Prompt tokens computed.
            attended: Sum over them of the tokens each attends to.
            sequences: Sequences that generate in the same step.
            context: Their context together.
        """
        prefill, decode = self.prefill, self.decode
        shared = decode.per_sequence_s * sequences + decode.per_context_token_s * context
        fixed = max(prefill.step_s, decode.step_s if sequences else 0.0)
        return fixed + prefill.per_token_s * tokens + prefill.per_token_context_s * attended + shared

    def prefill_s(self, tokens: int, cached: int = 0) -> float:
        """Computing a prompt of `tokens` alone on the engine when `cached` of them are there already."""
        left, at, total = tokens - cached, cached, 0.0
        while left > 0:
            chunk = min(left, self.max_num_batched_tokens)
            total += self.prefill_step_s(chunk, chunk * (at + chunk / 2), 0, 0.0)
            left, at = left - chunk, at + chunk
        return total


def profile_names() -> list[str]:
    """Names of the profiles that come with the package."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def load_timing(name_or_file: str) -> Timing:
    """A profile by name, or from a YAML or JSON file.

    Raises:
        ProfileError: There is none, or its content is wrong; the message names the key.
    """
    named = PROFILES / f"{name_or_file}.yaml"
    path = named if named.is_file() else Path(name_or_file)
    if not path.is_file():
        known = ", ".join(profile_names())
        raise ProfileError(f"no timing profile '{name_or_file}': expected a file, or one of {known}")
    try:
        return msgspec.convert(yaml.safe_load(path.read_text()), Timing)
    except (yaml.YAMLError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ProfileError(f"timing profile {path}: {error}") from error
