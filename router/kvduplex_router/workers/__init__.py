"""Several processes serving one address with one ledger: a hub, and workers that talk to it over a local socket."""
