"""Pools of vLLM engines: pause, update, verify, reset caches, resume."""

from weightwire_vllm.pool.pool import AsyncPool, Pool, PoolReport, UpdateFailed
from weightwire_vllm.pool.replica import ReplicaReport

__all__ = ["AsyncPool", "Pool", "PoolReport", "ReplicaReport", "UpdateFailed"]
