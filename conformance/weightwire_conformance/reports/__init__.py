"""A matrix as a person or a program reads it."""

__all__: list[str] = []
