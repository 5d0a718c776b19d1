"""An engine without ``weight_transfer_config``, updated by collective_rpc; prints what it saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import weightwire
from weightwire_vllm import inprocess
from weightwire_vllm.models import save_checkpoint, tiny_model

PROMPTS = [[5, 6, 7, 9]]


def main(directory: Path) -> None:
    models = {which: tiny_model("qwen3", seed) for which, seed in (("A", 1), ("B", 2))}
    session = f"file://{directory / 'run'}"
    seen = {}
    for which in "BA":
        llm = inprocess.build_engine(
            save_checkpoint(models[which], directory / which),
            dtype="bfloat16",
            weight_transfer_config=None,
            worker_extension_cls="weightwire_vllm.extension.WeightWireExtension",
        )
        seen[which] = inprocess.token_logprobs(llm, PROMPTS)
        if which == "B":
            inprocess.stop_engine(llm)
    wrong = {"session": session, "backend": "filesystem", "receiver_id": "r", "colour": "red"}
    try:
        llm.collective_rpc("weightwire_attach", args=(json.dumps(wrong),))
    except Exception as error:
        seen["wrong"] = str(error)
    del wrong["colour"]
    llm.collective_rpc("weightwire_attach", args=(json.dumps(wrong),))
    with weightwire.open_sender("filesystem", session=session, source=models["B"]) as sender:
        sender.send(7)
    llm.collective_rpc("weightwire_update", args=({"timeout": 30},))
    llm.reset_prefix_cache()
    seen["version"] = llm.collective_rpc("weightwire_version")
    seen["updated"] = inprocess.token_logprobs(llm, PROMPTS)
    llm.collective_rpc("weightwire_detach")
    inprocess.stop_engine(llm)
    print("SEEN " + json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
