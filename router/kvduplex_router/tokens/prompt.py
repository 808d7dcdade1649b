"""A prompt as the router's policies see it: how long it is, and the chains of block hashes over it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from enum import StrEnum

from kvduplex_router.events.hashing import TOKEN_BYTES, Extra, chain, root

__all__ = ["Prefix", "Prompt", "TokenSource"]


class TokenSource(StrEnum):
    """Where a prompt's tokens come from."""

    TOKENIZER = "tokenizer"
    """The served model's tokenizer and chat template, in this process."""
    GIVEN = "given"
    """The client sent token ids."""
    ESTIMATE = "estimate"
    """The request's bytes stand in for tokens, four to one."""


class Prefix:
    """Tokens of the beginning of a prompt, with what was worked out from them.

    Attributes:
        tokens: Packed token ids.
        chains: Block hashes by block size and scope.
    """

    __slots__ = ("chains", "tokens")

    def __init__(self, tokens: bytes) -> None:
        self.tokens = tokens
        self.chains: dict[tuple[int, str], array[int]] = {}

    @property
    def size(self) -> int:
        """Estimated bytes it keeps alive."""
        return 400 + len(self.tokens) + sum(8 * len(hashes) for hashes in self.chains.values())


class Prompt:
    """One request's prompt.

    Attributes:
        tokens: Packed token ids, or bytes that stand in for them.
        count: Tokens.
        source: Where they come from.
        model: As the request names it.
        salt: Its cache salt.
        boundary: Finds how many tokens lead up to a named place in the prompt; None when it is not known.
    """

    __slots__ = ("_chains", "_known", "_learned", "boundary", "count", "model", "salt", "source", "tokens")

    def __init__(
        self,
        tokens: bytes,
        *,
        source: TokenSource,
        model: str = "",
        salt: str | None = None,
        known: Prefix | None = None,
        learned: Prefix | None = None,
        boundary: Callable[[str], int | None] = lambda _place: None,
    ) -> None:
        self.tokens = tokens
        self.count = len(tokens) // TOKEN_BYTES
        self.source = source
        self.model = model
        self.salt = salt
        self._known = known
        self._learned = learned
        self.boundary = boundary
        self._chains: dict[tuple[int, str | None, str], Sequence[int]] = {}

    @property
    def exact(self) -> bool:
        """Whether the tokens are those the engine will see, so that engines' events can be compared with them."""
        return self.source is not TokenSource.ESTIMATE

    def chain(self, block_size: int, adapter: str | None = None, *, scope: str = "") -> Sequence[int]:
        """Hashes of the prompt's full blocks; begun from what is known of its beginning.

        Args:
            block_size: Tokens per block.
            adapter: LoRA adapter, as engines' events name it.
            scope: Prompts of different scopes have no block in common.
        """
        key = (block_size, adapter, scope)
        found = self._chains.get(key)
        if found is None:
            plain = adapter is None and self.salt is None
            found = self._plain(block_size, scope) if plain else self._extra(block_size, adapter, scope)
            self._chains[key] = found
        return found

    def _plain(self, block_size: int, scope: str) -> Sequence[int]:
        before = self._known.chains.get((block_size, scope)) if self._known is not None else None
        if before:
            hashes = before[:]
            rest = self.tokens[len(hashes) * block_size * TOKEN_BYTES :]
            hashes.extend(chain(hashes[-1], rest, block_size))
        else:
            hashes = array("Q", chain(root(block_size, scope), self.tokens, block_size))
        if self._learned is not None:
            whole = len(self._learned.tokens) // (block_size * TOKEN_BYTES)
            self._learned.chains[block_size, scope] = hashes[:whole]
        return hashes

    def _extra(self, block_size: int, adapter: str | None, scope: str) -> Sequence[int]:
        """With an adapter in every block, and the salt in the first."""
        count = len(self.tokens) // (block_size * TOKEN_BYTES)
        first: Extra = tuple(part for part in (adapter, self.salt) if part is not None)
        rest: Extra = None if adapter is None else (adapter,)
        return chain(
            root(block_size, scope), self.tokens, block_size, [first] + [rest] * (count - 1) if count else None
        )
