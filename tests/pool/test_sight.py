"""What a pool reads in a session, over real senders and receivers."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

import weightwire
from weightwire.errors import ConfigError, SessionError
from weightwire_vllm.pool.sight import ReplicaSight, Sight
from weightwire_vllm.watch.claim import Claims


@pytest.fixture
def session(tmp_path):
    return f"file://{tmp_path / 'run'}"


def look(sight: Sight, name: str = "r") -> ReplicaSight:
    return asyncio.run(sight.look(name))


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((8,), value)}


def receiver(session: str, backend: str, name: str = "r"):
    target = weights(0)
    return weightwire.open_receiver(backend, session=session, target=target, receiver_id=name)


def test_a_session_that_isnt_there_yet_is_an_error_and_later_it_is_read(session):
    sight = Sight(session)
    with pytest.raises(SessionError, match="doesn't exist"):
        look(sight)
    with receiver(session, "filesystem"):
        assert look(sight).joined
    sight.close()


def test_stored_versions_are_wanted_until_they_are_held(session):
    sight = Sight(session)
    with (
        weightwire.open_sender("filesystem", session=session, source=weights(1)) as sender,
        receiver(session, "filesystem") as replica,
        receiver(session, "filesystem", "r-other"),
    ):
        seen = look(sight)
        assert (seen.joined, seen.serving, seen.wanted, seen.behind) == (True, None, None, False)
        sender.send(1)
        seen = look(sight)
        assert (seen.wanted, seen.stored, seen.behind) == (1, True, True)
        assert not look(sight, "nobody").joined
        replica.receive(timeout=20)
        seen = look(sight)
        assert (seen.serving, seen.wanted, seen.behind) == (1, None, False)
        assert look(sight, "r-other").wanted == 1
    assert not look(sight).joined
    sight.close()


@pytest.mark.parametrize("of_first", ["r-dp0", "r"])
def test_data_parallel_ranks_count_together(session, of_first):
    sight = Sight(session)
    with (
        weightwire.open_sender("filesystem", session=session, source=weights(1)) as sender,
        receiver(session, "filesystem", of_first) as first,
        receiver(session, "filesystem", "r-dp1") as second,
    ):
        sender.send(1)
        first.receive(timeout=20)
        seen = look(sight)
        assert (seen.serving, seen.wanted) == (None, 1)
        second.receive(timeout=20)
        seen = look(sight)
        assert (seen.serving, seen.wanted) == (1, None)
    sight.close()


def test_a_live_offer_is_wanted_by_its_roster_while_it_waits(session):
    sight = Sight(session)
    with (
        weightwire.open_sender("memory", session=session, source=weights(1), timeout=30) as sender,
        receiver(session, "memory") as replica,
    ):
        assert look(sight).wanted is None
        sending = threading.Thread(target=sender.send, args=(1,))
        sending.start()
        try:
            deadline = time.monotonic() + 20
            while (seen := look(sight)).wanted is None:
                assert time.monotonic() < deadline
            assert (seen.wanted, seen.stored) == (1, False)
            replica.receive(timeout=20)
        finally:
            sending.join(timeout=30)
        seen = look(sight)
        assert (seen.serving, seen.wanted, seen.behind) == (1, None, False)
    sight.close()


def test_a_new_senders_versions_count_and_the_old_ones_dont(session):
    sight = Sight(session)
    with receiver(session, "filesystem") as replica:
        with weightwire.open_sender("filesystem", session=session, source=weights(1)) as sender:
            sender.send(5)
            replica.receive(timeout=20)
        with weightwire.open_sender("filesystem", session=session, source=weights(2)) as sender:
            assert not look(sight).behind  # nothing of the new one is finished yet
            sender.send(5)
            seen = look(sight)
            assert (seen.serving, seen.wanted, seen.behind) == (5, 5, True)
    sight.close()


def test_an_engine_has_one_watcher(session):
    first, second = Claims(session, ["r", "s"]), Claims(session, ["s"])
    asyncio.run(first.hold(20))
    asyncio.run(first.hold(20))  # held is held
    with pytest.raises(ConfigError, match="'s' is watched already"):
        asyncio.run(second.hold(20))
    first.release()
    asyncio.run(second.hold(20))
    second.release()
    second.release()
