"""The ``weightwire`` command."""
