"""Requests in flight while a server is updated, in each pause mode: which policy said what."""

from __future__ import annotations

import pytest
from server_rig import MOST, Load, Server, is_caught, sender_of

from weightwire.vllm import Pool

PROMPT_OF_LOAD = Load.prompt(0)
TRIES = 8


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_each_token_is_named_after_the_policy_that_said_it(servers, session, mode):
    a = servers["A"]
    said = {}
    with Pool({"r": a.url}, session=session, backend="filesystem", mode=mode, timeout=60) as pool:
        pool.attach()
        for version, which in ((1, "B"), (2, "A")):
            with sender_of(session, which) as sender:
                sender.send(version)
            pool.update(version)
            said[str(version)] = a.generate(PROMPT_OF_LOAD, MOST)["token_ids"]
        # Now and then no request is in flight just as the engine pauses.
        for version in range(3, 3 + TRIES):
            with sender_of(session, "B" if version % 2 else "A") as sender:
                sender.send(version)
            said[str(version)] = said[str(version - 2)]
            with Load(a, threads=1, most=MOST) as load:
                pool.update(version)
            answers = [Server.generated(answer) for answer in load.answers]
            caught = [answer for answer in answers if is_caught(answer, mode)]
            for answer in answers:
                first, *others = answer["weight_versions"]
                assert first["start"] == 0
                assert len(others) <= (mode == "keep")
                tokens = answer["token_ids"][: first["end"]]
                assert tokens == said[first["version"]][: first["end"]]
                assert len(answer["token_ids"]) == MOST or answer in caught
            if caught:
                break
        assert caught, mode
        if mode == "keep":
            (answer,) = caught
            first, second = answer["weight_versions"]
            switch = first["end"]
            assert second == {"version": str(version), "start": switch, "end": MOST}
            # The new policy's words after the old one's, computed anew.
            a.call("/reset_prefix_cache")
            rest = a.generate(PROMPT_OF_LOAD + answer["token_ids"][:switch], MOST - switch)
            assert rest["token_ids"] == answer["token_ids"][switch:]
        pool.detach()
