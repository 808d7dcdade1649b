"""Lets the progress thread of a UCX agent sleep until there is something to do.

NIXL's Python layer creates every agent with a progress delay of 0 (NIXL 1.5, ``_api.py``), and the UCX plugin waits for
its workers' events with that delay as the timeout of ``poll()``. So the thread never sleeps: it takes a core from each
engine, also when nothing is transferred. On machines with few cores that is the core that computes. With a delay of a
millisecond the thread still wakes at once for an event, since it polls the workers' descriptors; the delay only bounds
how long it may miss what raises none. ``docs/measurements.md`` has the figures; upstream's intention is NIXL's pull
request 347, https://github.com/ai-dynamo/nixl/pull/347.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Final

__all__ = ["PROGRESS_DELAY_US", "resting_progress"]

PROGRESS_DELAY_US: Final = 1000

_lock = threading.RLock()  # one at a time: what is put back must be what was there
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def resting_progress(nixl_agent: type, backends: Iterable[str]) -> Iterator[None]:
    """Agents that are created within the block get a progress delay of `PROGRESS_DELAY_US`, if UCX is all they run.

    Other backends sleep for the delay instead of waiting for an event, so with any of them nothing is changed.

    Args:
        nixl_agent: NIXL's agent class, as imported; it says which of NIXL's wheels is in use.
        backends: NIXL's backends of those agents.
    """
    if set(backends) != {"UCX"}:
        yield
        return
    bindings: Any = getattr(sys.modules[nixl_agent.__module__], "nixlBind", None)
    with _lock:
        base: Any = getattr(bindings, "nixlAgentConfig", None)
        delay: Any = getattr(base, "pthrDelay", None)
        if not isinstance(delay, property) or delay.fset is None:
            _log.warning("NIXL has no progress delay to set; its progress thread may take a core of its own")
            yield
            return
        put = delay.fset
        resting = property(delay.fget, lambda config, us: put(config, max(us, PROGRESS_DELAY_US)))
        bindings.nixlAgentConfig = type("nixlAgentConfig", (base,), {"pthrDelay": resting})
        try:
            yield
        finally:
            bindings.nixlAgentConfig = base
