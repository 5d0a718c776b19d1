"""``weightwire watch``: a sidecar that follows a session and drives a pool of vLLM servers."""

from weightwire_vllm.watch.loop import Watcher, WatchOptions

__all__ = ["WatchOptions", "Watcher"]
