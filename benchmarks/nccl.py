"""Measure the nccl backend: ``python benchmarks/nccl.py --device cuda``."""

from __future__ import annotations

from weightwire_nccl.bench import main

if __name__ == "__main__":
    main()
