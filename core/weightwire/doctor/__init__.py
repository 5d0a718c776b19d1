"""What is installed and usable on this machine, found by doing it: ``weightwire doctor``.

A plug-in brings checks by ``weightwire_describe_checks``; see ``docs/writing-a-backend.md``.
"""

from weightwire.doctor.check import Check, CheckOptions, Finding, State, Verdict
from weightwire.doctor.children import Step, together
from weightwire.doctor.examination import Examination, examine

__all__ = [
    "Check",
    "CheckOptions",
    "Examination",
    "Finding",
    "State",
    "Step",
    "Verdict",
    "examine",
    "together",
]
