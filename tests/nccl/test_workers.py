"""A thread that does one thing after the other."""

from __future__ import annotations

import pytest

from weightwire_nccl.workers import Worker


def test_a_thread_outlives_what_its_jobs_raise_whatever_is_made_of_that() -> None:
    left = []

    def failed(error: BaseException) -> BaseException:
        if isinstance(error, KeyError):
            raise OSError("the session is gone")
        return RuntimeError(f"in other words: {error}")

    worker = Worker("worker", lambda: None, failed, lambda: left.append(True))
    jobs = [worker.submit(work) for work in (lambda: {}["a"], lambda: 1 / 0, lambda: 3)]
    worker.end()
    assert worker.join(10)
    assert all(job.done.is_set() for job in jobs)
    with pytest.raises(KeyError) as raised:
        jobs[0].outcome()
    assert "the session is gone" in raised.value.__notes__[0]
    with pytest.raises(RuntimeError, match="in other words: division by zero"):
        jobs[1].outcome()
    assert jobs[2].outcome() == 3
    assert left == [True]
