"""What must hold before anything is started: each check names what is wrong, and the way out."""

from kvduplex.preflight.memory import memory_findings
from kvduplex.preflight.model import model_findings
from kvduplex.preflight.ports import port_findings
from kvduplex.preflight.refuse import refuse_failures

__all__ = ["memory_findings", "model_findings", "port_findings", "refuse_failures"]
