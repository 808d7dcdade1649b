"""The cluster file: what one cluster is to be, checked before anything is synthesised."""

from kvduplex_infra.cluster.file import load_cluster
from kvduplex_infra.cluster.model import Cluster

__all__ = ["Cluster", "load_cluster"]
