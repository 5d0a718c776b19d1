"""A pool over engines that are made of real receivers, and nothing of vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import weightwire
from weightwire.deadline import Deadline
from weightwire.errors import ConfigError, PeerLost, SessionError, TransferError
from weightwire.session.session import Session
from weightwire_vllm.pool import AsyncPool, UpdateFailed
from weightwire_vllm.pool.engines import EngineControl, PauseMode
from weightwire_vllm.watch import Watcher, WatchOptions


class Engine(EngineControl):
    """Opens a receiver where vLLM would.

    Args:
        late: seconds until it has joined.
        broken: what its updates raise.
    """

    def __init__(self, name: str, *, late: float = 0.0, broken: Exception | None = None) -> None:
        self.name = name
        self.lost = False
        self.elsewhere = False
        self.not_resumed = 0
        self._late = late
        self._broken = broken
        self._receiver: Any = None
        self._version = ""

    async def check(self, timeout: float) -> None:
        if self.lost:
            raise PeerLost(f"{self.name} can't be reached: start it")

    async def pause(self, mode: PauseMode, timeout: float) -> None:
        pass

    async def resume(self, timeout: float) -> None:
        if self.not_resumed:
            self.not_resumed -= 1
            raise TransferError(f"{self.name}: /resume failed: busy")

    async def is_paused(self, timeout: float) -> bool:
        return False

    async def wake(self, tags: Sequence[str], timeout: float) -> None:
        pass

    async def attach(self, info: dict[str, Any], timeout: float) -> None:
        if self.elsewhere:
            return
        await asyncio.sleep(self._late)
        self._receiver = await asyncio.to_thread(
            weightwire.open_receiver,
            info["backend"],
            session=info["session"],
            target={"w": torch.zeros(8)},
            receiver_id=info["receiver_id"],
        )

    async def detach(self, timeout: float) -> None:
        self._receiver.close()

    async def start(self, timeout: float) -> None:
        pass

    async def update(self, info: dict[str, Any], timeout: float) -> None:
        if self._broken is not None:
            raise self._broken
        await asyncio.to_thread(self._receiver.receive, timeout=info["timeout"])

    async def finish(self, timeout: float) -> None:
        pass

    async def name_version(self, version: str, timeout: float) -> str:
        self._version = version
        return version

    async def reset_caches(self, timeout: float) -> None:
        pass

    async def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()


def run(session: str, engines: dict[str, Engine], steps: Any) -> None:
    async def all_steps() -> None:
        async with AsyncPool(engines, session=session, backend="filesystem", timeout=30) as pool:
            await steps(pool)

    asyncio.run(all_steps())


@pytest.fixture
def session(tmp_path):
    return f"file://{tmp_path / 'run'}"


def test_an_engine_that_comes_after_another_failed_does_not_wait_for_its_turn(session):
    async def steps(pool: AsyncPool) -> None:
        async with asyncio.timeout(60):
            with pytest.raises(
                UpdateFailed, match=r"1 of 2 engines failed \(bad\): broken"
            ) as found:
                await pool.update(1)
        assert list(found.value.report.updated) == ["late"]
        assert pool.out == {"bad": "broken"}

    engines = {
        "bad": Engine("bad", broken=TransferError("broken")),
        "late": Engine("late", late=1.5),
    }
    with weightwire.open_sender(
        "filesystem", session=session, source={"w": torch.ones(8)}, max_unavailable=1
    ) as sender:
        sender.send(1)
        run(session, engines, steps)


def test_an_engine_that_has_gone_is_no_longer_in_service(session):
    engines = {"r": Engine("r")}

    async def steps(pool: AsyncPool) -> None:
        await pool.update(1)
        assert pool.in_service == {"r": 1}
        await engines["r"].detach(1)
        engines["r"].lost = True
        with pytest.raises(UpdateFailed, match="can't be reached"):
            await pool.update(2)
        assert pool.in_service == {}
        assert "can't be reached" in pool.out["r"]
        engines["r"].lost = False
        await pool.update(1)
        assert pool.in_service == {"r": 1}

    with weightwire.open_sender(
        "filesystem", session=session, source={"w": torch.ones(8)}
    ) as sender:
        sender.send(1)
        run(session, engines, steps)


def test_an_engine_that_has_the_version_and_did_not_resume_is_resumed_by_the_next_update(session):
    engines = {"r": Engine("r")}

    async def steps(pool: AsyncPool) -> None:
        engines["r"].not_resumed = 1
        with pytest.raises(UpdateFailed, match="/resume failed: busy"):
            await pool.update(1)
        assert pool.out == {"r": "r: /resume failed: busy"}
        report = await pool.update(1)
        assert report.updated["r"].version == 1
        assert "update" not in report.updated["r"].seconds
        assert pool.in_service == {"r": 1}
        assert (await pool.update(1)).held == ("r",)

    with weightwire.open_sender(
        "filesystem", session=session, source={"w": torch.ones(8)}
    ) as sender:
        sender.send(1)
        run(session, engines, steps)


def test_a_watcher_resumes_an_engine_that_has_the_version_and_did_not_resume(session, capsys):
    engine = Engine("r")
    engine.not_resumed = 2

    async def follow() -> int:
        watcher = Watcher(WatchOptions(session, {"r": "http://127.0.0.1:1"}, "filesystem"))
        (replica,) = watcher._pool.replicas.values()
        replica.engine = engine
        running = asyncio.create_task(watcher.run())
        async with asyncio.timeout(60):
            while replica.state != "serving" or replica.version != 1:
                await asyncio.sleep(0.05)
        watcher.stop()
        return await running

    with weightwire.open_sender(
        "filesystem", session=session, source={"w": torch.ones(8)}
    ) as sender:
        sender.send(1)
        assert asyncio.run(follow()) == 0
    said = capsys.readouterr().out
    assert said.count("1 failed: r: /resume failed: busy") == 2
    assert "1 on 1 of 1 engines" in said


def test_an_engine_that_attached_itself_elsewhere_is_named(session):
    engine = Engine("r")
    engine.elsewhere = True

    async def steps(pool: AsyncPool) -> None:
        with pytest.raises(SessionError, match="'r' isn't in the session: let it reach the same"):
            await pool.attach()

    Session.open(session, deadline=Deadline(10)).close()
    run(session, {"r": engine}, steps)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"timeout": 0}, "timeout 0 is not above zero"),
        ({"version": "7"}, "version '7' isn't a whole number"),
        ({"version": -1}, "version -1 isn't a whole number"),
        ({"version": True}, "version True isn't a whole number"),
        ({"mode": ""}, "mode='': use one of keep"),
        ({"caches": ""}, "caches='': use one of reset"),
    ],
)
def test_an_argument_out_of_range_is_refused_before_any_engine_is_asked(
    session, arguments, message
):
    async def steps(pool: AsyncPool) -> None:
        with pytest.raises(ConfigError, match=message):
            await pool.update(**arguments)

    run(session, {"r": Engine("r")}, steps)


@pytest.mark.parametrize("name", ["a b", "a/b", "", ".a", "a\x1b[2J"])
def test_a_receiver_id_that_names_no_record_is_refused(session, name):
    with pytest.raises(ConfigError):
        AsyncPool({name: "http://a:1"}, session=session, backend="filesystem")
