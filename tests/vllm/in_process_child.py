"""An ``AsyncLLM`` in a pool, then engines of this process alone; prints what was seen as JSON."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvicorn
import watched_worker
from server_rig import (
    LONGEST,
    MOST,
    PROMPT,
    become,
    checkpoint,
    free_port,
    is_caught,
    model,
    sender_of,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from watch_rig import COMMAND

import weightwire
from vllm import SamplingParams
from weightwire.vllm import AsyncPool
from weightwire_vllm import inprocess
from weightwire_vllm.extension import WeightWireExtension

TRIES = 6


class Extended(watched_worker.Watched, WeightWireExtension):
    """For an engine without ``weight_transfer_config``."""


async def words(engine: AsyncLLM, name: str) -> Any:
    """A long greedy answer, with what its tokens are named after."""
    sampling = SamplingParams(temperature=0, max_tokens=MOST, ignore_eos=True, detokenize=False)
    async for answer in engine.generate({"prompt_token_ids": PROMPT}, sampling, name):
        last = answer.outputs[0]
    return {  # as the server's route
        "token_ids": list(last.token_ids),
        "weight_versions": list(map(asdict, last.weight_versions or ())),
        "finish_reason": last.finish_reason,
    }


async def asked(engine: AsyncLLM, name: str, enough: asyncio.Event) -> Any:
    """Answers one after the other, until it is enough."""
    answers = []
    while not enough.is_set():
        answers.append(await words(engine, f"{name}-{len(answers)}"))
    return answers


async def held(engine: AsyncLLM) -> Any:
    (of_worker,) = await engine.compute_weight_checksums()
    return of_worker


async def pooled(directory: Path) -> dict[str, Any]:
    """An engine on A in a pool; its sender waits for it."""
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(directory / "A"),
            served_model_name="tiny",
            enforce_eager=True,
            max_model_len=LONGEST,
            weight_transfer_config={"backend": "weightwire"},
            worker_extension_cls="watched_worker.Watched",
        )
    )
    session = f"file://{directory / 'async'}"
    seen: dict[str, Any] = {"cold A": await held(engine), "alone": await words(engine, "alone")}
    source = model("A")
    try:
        async with AsyncPool([engine], session=session, backend="memory", timeout=60) as pool:
            await pool.attach()
            with weightwire.open_sender("memory", session=session, source=source) as sender:
                # Now and then no request is in flight just as the engine pauses.
                modes, seen["updates"] = ["keep", "wait", "abort"] * TRIES, []
                for version, which in zip(range(1, len(modes) + 1), itertools.cycle("BA")):
                    if not modes:
                        break
                    mode = modes.pop(0)
                    become(source, which)
                    enough = asyncio.Event()
                    asking = asyncio.create_task(asked(engine, f"{version}", enough))
                    sending = asyncio.create_task(sender.asend(version))
                    report = await pool.update(version, mode=mode)
                    enough.set()
                    await sending
                    update = {
                        "mode": mode,
                        "which": which,
                        "answers": await asking,
                        "holds": await held(engine),
                        "updated": [[name, r.version] for name, r in report.updated.items()],
                    }
                    seen["updates"].append(update)
                    if any(is_caught(answer, mode) for answer in update["answers"]):
                        modes = [other for other in modes if other != mode]
                seen["in service"] = pool.in_service
            await pool.detach()
        seen["watch"] = await watched(engine, session)
    finally:
        engine.shutdown()
    return seen


async def watched(engine: AsyncLLM, session: str) -> Any:
    """What a watcher says of this engine behind vLLM's API server without its RL routes."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "tiny"])
    app = build_app(arguments, ("generate",))
    await init_app_state(engine, app.state, arguments, ("generate",))
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", port, log_level="error"))
    serving = asyncio.create_task(server.serve())
    try:
        watch = await asyncio.create_subprocess_exec(
            *(*COMMAND, "--session", session, "--engine", f"http://127.0.0.1:{port}"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        _, error = await asyncio.wait_for(watch.communicate(), 60)
    finally:
        server.should_exit = True
        await serving
    return [watch.returncode, error.decode()]


def extended(directory: Path) -> dict[str, Any]:
    """Engines of this process, updated by ``collective_rpc``."""
    session = f"file://{directory / 'run'}"
    seen: dict[str, Any] = {}
    for which in "BA":
        llm = inprocess.build_engine(
            directory / which,
            dtype="bfloat16",
            weight_transfer_config=None,
            worker_extension_cls="in_process_child.Extended",
        )
        seen[f"cold {which}"] = [inprocess.token_logprobs(llm, [PROMPT]), checksums(llm)]
        if which == "B":
            inprocess.stop_engine(llm)
    wrong = {"session": session, "backend": "filesystem", "receiver_id": "r", "colour": "red"}
    try:
        llm.collective_rpc("weightwire_attach", args=(json.dumps(wrong),))
    except Exception as error:
        seen["wrong"] = str(error)
    del wrong["colour"]
    llm.collective_rpc("weightwire_attach", args=(json.dumps(wrong),))
    with sender_of(session, "B") as sender:
        sender.send(7)
    llm.collective_rpc("weightwire_update", args=({"timeout": 30},))
    llm.reset_prefix_cache()
    seen["version"] = llm.collective_rpc("weightwire_version")
    seen["updated"] = [inprocess.token_logprobs(llm, [PROMPT]), checksums(llm)]
    llm.collective_rpc("weightwire_detach")
    inprocess.stop_engine(llm)
    return seen


def checksums(llm: Any) -> Any:
    (of_worker,) = llm.collective_rpc("compute_weight_checksums")
    return of_worker


def main(directory: Path) -> None:
    for which in "AB":
        checkpoint(which, directory)
    # First, while this process has no threads: it forks its engine.
    followed = asyncio.run(pooled(directory))
    print("SEEN " + json.dumps({"async": followed, **extended(directory)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
