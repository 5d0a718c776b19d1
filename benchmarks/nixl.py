"""Measure the nixl backend: ``python benchmarks/nixl.py --device cuda:0``."""

from __future__ import annotations

from weightwire_nixl.bench import main

if __name__ == "__main__":
    main()
