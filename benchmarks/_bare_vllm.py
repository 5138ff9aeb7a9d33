"""vLLM without verl in a process, with the settings of our engine, as the reference for `rollout=vllm`.

Started by `vllm_rollout.py` and `weight_switch.py`; takes one JSON object a line and answers with one.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class BareEngine:
    """The other process, as the benchmark sees it.

    Args:
        directory: of the model.
        arguments: of `vllm.LLM`.
        variables: of the process.
    """

    def __init__(self, directory: str, arguments: dict[str, Any], variables: dict[str, str]):
        self._process = subprocess.Popen(
            [sys.executable, __file__, directory, json.dumps(arguments)],
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.told = self._answer()

    def ask(self, **question: Any) -> dict[str, Any]:
        """Have something done; see `answer`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError("vLLM ended")


def resident_mib(pid: int | str = "self") -> float:
    """Memory of a process that is in use."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    directory, arguments = sys.argv[1], json.loads(sys.argv[2])
    answers, sys.stdout = sys.stdout, sys.stderr
    import torch
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    weights = load_file(Path(directory) / "model.safetensors")

    def new_engine() -> Any:
        return LLM(directory, skip_tokenizer_init=True, async_scheduling=False, disable_log_stats=True, **arguments)

    llm = new_engine()

    def generate(prompts: list[list[int]], lengths: list[int], log_probs: bool) -> int:
        params = [
            SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, logprobs=0 if log_probs else None)
            for n in lengths
        ]
        found = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in found)

    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        start, tokens = time.perf_counter(), 0
        if question["do"] == "generate":
            tokens = generate(question["prompts"], question["lengths"], question["log_probs"])
        elif question["do"] == "reload":
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
        else:
            del llm
            with contextlib.suppress(ImportError):
                from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

                cleanup_dist_env_and_memory()
            gc.collect()
            start = time.perf_counter()
            llm = new_engine()
        found = {"seconds": time.perf_counter() - start, "tokens": tokens, "mib": resident_mib()}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
