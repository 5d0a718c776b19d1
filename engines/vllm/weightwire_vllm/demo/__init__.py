"""The main job, small: a REINFORCE loop whose samples come from a running vLLM."""

from weightwire_vllm.demo.actor import Actor
from weightwire_vllm.demo.policy import Policy, reward_of
from weightwire_vllm.demo.run import DemoOptions, run_demo

__all__ = ["Actor", "DemoOptions", "Policy", "reward_of", "run_demo"]
