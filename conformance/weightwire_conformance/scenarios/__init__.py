"""What a backend must do, one theme a module; see ``weightwire_conformance.scenario``."""

__all__ = ["THEMES"]

THEMES = {
    "tensors": "every tensor arrives, byte for byte",
}
"""Modules in the order of the report, and what each proves."""
