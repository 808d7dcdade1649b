"""Supervision of the programs that make a cluster: engines and router.

`supervise` starts them, shows their progress, and leaves nothing behind, however it ends.
"""

from kvduplex.supervise.progress import PlainProgress, Progress, show_progress
from kvduplex.supervise.run import supervise
from kvduplex.supervise.unit import Stage, Unit, UnitKind

__all__ = ["PlainProgress", "Progress", "Stage", "Unit", "UnitKind", "show_progress", "supervise"]
