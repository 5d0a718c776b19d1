"""What a backend must do, one theme a module; see ``weightwire_conformance.scenario``."""

__all__ = ["THEMES"]

THEMES = {
    "tensors": "every tensor arrives, byte for byte",
    "placements": "shards of any placement become whole tensors",
    "views": "checkpoint tensors arrive from a trainer that holds others",
    "versions": "versions follow each other",
    "membership": "receivers and senders come and go",
    "worlds": "sides of several ranks act as one",
    "failures": "a failure is told, and doesn't last",
    "deadlines": "no wait outlasts its deadline",
    "tables": "what doesn't fit is refused before a byte moves",
    "corruption": "corrupted bytes are found",
    "elasticity": "coming, going and failing costs the others nothing",
    "rollouts": "a pool gets a version in waves, and within its bounds",
    "flat": "nothing grows, nothing is left",
    "declaration": "what is declared is true",
}
"""Modules in the order of the report, and what each proves."""
