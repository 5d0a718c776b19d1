"""Measure the filesystem backend: ``python benchmarks/filesystem.py --directory /dev/shm``."""

from __future__ import annotations

from weightwire_filesystem.bench import main

if __name__ == "__main__":
    main()
