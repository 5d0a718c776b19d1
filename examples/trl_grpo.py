"""TRL's GRPO trainer, with its weight sync replaced by weightwire's.

TRL's ``vllm_mode="server"`` moves weights in one method, ``VLLMGeneration.sync_weights``: full
tensors from rank 0, over NCCL, while nobody pauses the engine.  Here that method sends a version
(each rank what it holds) and has a pool bring it to the server.  Everything else is TRL's own.

Run it with ``python examples/trl_grpo.py``; a number of steps may follow.
It needs ``pip install 'weightwire[examples]'`` beside vLLM.
"""

import contextlib
import sys
import tempfile
from pathlib import Path

import httpx
from datasets import Dataset
from rl_loop_http import await_server, end, start_server
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

import weightwire
from weightwire.vllm import Pool
from weightwire_vllm.demo import reward_of
from weightwire_vllm.models import save_checkpoint, tiny_model


class Generation(VLLMGeneration):
    """TRL's generation through a vLLM server, whose weights come by weightwire."""

    session = ""
    """Set before the trainer is made, which makes this object."""

    def _init_vllm(self) -> None:
        ranks = self.accelerator
        if ranks.is_main_process:
            self.vllm_client = VLLMClient(self.server_base_url)  # for samples alone
            self.pool = Pool([self.server_base_url], session=self.session, backend="filesystem")
        self.sender = weightwire.open_sender(
            {"backend": "filesystem", "keep": 2},
            session=self.session,
            source=self.model,  # DDP's, FSDP2's: no rank gathers it
            wire_dtype="bfloat16",
            rank=ranks.process_index,
            world_size=ranks.num_processes,
        )
        self.version = 0
        ranks.wait_for_everyone()

    def sync_weights(self) -> None:
        self.version += 1
        self.sender.send(self.version)
        if self.accelerator.is_main_process:
            report = self.pool.update(self.version)  # pauses, resets caches, resumes
            paused = max(replica.paused_seconds for replica in report.updated.values())
            print(f"version {self.version}: the server was paused for {paused:.3f} s", flush=True)
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        if self.accelerator.is_main_process:
            self.pool.close()
        self.sender.close()


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        checkpoint, tokenizer = make_checkpoint(Path(directory) / "initial")
        options = ("--logprobs-mode", "processed_logprobs")
        url, server = start_server(checkpoint, Path(directory) / "server.log", *options)
        stack.callback(end, server)
        client = stack.enter_context(httpx.Client(base_url=url, timeout=60, trust_env=False))
        await_server(client, server)

        Generation.session = f"file://{directory}/session"
        grpo_trainer.VLLMGeneration = Generation
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32"),
            reward_funcs=reward,
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(2, 66)]}),
            args=GRPOConfig(
                output_dir=f"{directory}/trainer",
                use_vllm=True,
                vllm_mode="server",
                vllm_server_base_url=url,
                max_steps=steps,
                per_device_train_batch_size=16,
                num_generations=8,
                max_completion_length=12,
                generation_kwargs={"ignore_eos": True},
                learning_rate=1e-2,
                use_cpu=True,
                bf16=False,
                save_strategy="no",
                logging_steps=1,
                report_to=[],
            ),
        )
        stack.callback(trainer.vllm_generation.close)
        trainer.train()
        trainer.vllm_generation.sync_weights()  # the last step's
        for entry in trainer.state.log_history:
            if "reward" in entry:
                # How far the server's log-probabilities were from the trainer's own.
                drift = entry.get("sampling/sampling_logp_difference/mean", 0.0)
                print(f"step {entry['step']}: reward {entry['reward']:.3f}, drift {drift:.4f}")
        served = client.get("/weight_info").json()["weight_version"]
        print(f"the server serves version {served}", flush=True)


def reward(completion_ids: list[list[int]], **others: object) -> list[float]:
    """Share of tokens whose id is a multiple of ``TARGET_STRIDE``."""
    return [reward_of(tokens) for tokens in completion_ids]


def make_checkpoint(path: Path) -> tuple[Path, PreTrainedTokenizerFast]:
    """A tiny random model, and a tokenizer that knows its ids as words."""
    save_checkpoint(tiny_model("qwen3", seed=0), path)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(320)}, unk_token="w2"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w2", eos_token="w1", pad_token="w1"
    )
    tokenizer.save_pretrained(path)
    return path, tokenizer


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
