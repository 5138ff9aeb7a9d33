"""vLLM as a rollout engine: it lives in a process of its own, and the trainer's weights are streamed to it."""
