"""TLS towards engines."""

from __future__ import annotations

import ssl

from kvduplex_router.config import TlsConfig
from kvduplex_router.errors import ConfigError

__all__ = ["client_context"]


def client_context(config: TlsConfig) -> ssl.SSLContext:
    """A context that checks engines and, when configured, shows the router's own certificate.

    Raises:
        ConfigError: A file is missing or is no certificate or key.
    """
    try:
        context = ssl.create_default_context(cafile=None if config.ca_file is None else str(config.ca_file))
        if config.cert_file is not None:
            context.load_cert_chain(config.cert_file, config.key_file)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(str(f) for f in (config.ca_file, config.cert_file, config.key_file) if f is not None)
        raise ConfigError(f"tls: cannot load {files}: {error}") from error
    return context
