"""Every error class that NIXL has arrives as one of ours."""

from __future__ import annotations

import importlib

import pytest

from kvduplex_transfer.errors import BackendUnavailableError, PeerLostError, TransferError, TransferFailedError
from kvduplex_transfer.nixl_errors import NIXL_ERRORS, nixl_call


def test_every_class_of_the_installed_nixl_is_mapped_and_no_other() -> None:
    bindings = pytest.importorskip("nixl._bindings")
    names = {
        name
        for name, value in vars(bindings).items()
        if isinstance(value, type) and issubclass(value, BaseException) and name.startswith("nixl")
    }

    assert names == set(NIXL_ERRORS)


@pytest.mark.parametrize("name", sorted(NIXL_ERRORS))
def test_each_class_is_raised_as_ours_from_the_original(name: str) -> None:
    pytest.importorskip("nixl._bindings")
    original: Exception = getattr(importlib.import_module("nixl._bindings"), name)("NIXL_ERR_X")

    with pytest.raises(NIXL_ERRORS[name], match=f"cannot do it: {name}: NIXL_ERR_X") as caught, nixl_call("do it"):
        raise original

    assert isinstance(caught.value, TransferError)
    assert caught.value.__cause__ is original
    assert original.__traceback__ is None


class nixlBackendError(Exception):  # noqa: N801 - stands for NIXL's class of that name
    pass


def test_the_call_may_say_what_a_class_means_here() -> None:
    with pytest.raises(PeerLostError), nixl_call("connect", {"nixlBackendError": PeerLostError}):
        raise nixlBackendError
    with pytest.raises(TransferFailedError), nixl_call("connect", {"nixlNotFoundError": PeerLostError}):
        raise nixlBackendError


def test_a_hint_ends_the_message() -> None:
    with pytest.raises(TransferFailedError, match=r"cannot start: nixlBackendError: ; look at ldd$"):  # noqa: SIM117
        with nixl_call("start", hint="look at ldd"):
            raise nixlBackendError


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(ZeroDivisionError), nixl_call("divide"):
        raise ZeroDivisionError
    with pytest.raises(BackendUnavailableError), nixl_call("start", {"RuntimeError": BackendUnavailableError}):
        raise RuntimeError("no plugins")
