"""Started by test_vllm_arguments.py in a process of its own: vLLM's own checks of engine settings, as on a GPU.

Reads a pickle of {name: (engine arguments, DeviceMemory)} and a model directory, writes {name: what vLLM says} as JSON.
"""

import json
import os
import pickle
import sys
from typing import Any

os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker.utils import request_memory


def check(directory: str, arguments: dict[str, Any], memory: Any) -> dict[str, Any]:
    snapshot = MemorySnapshot(device="cpu", auto_measure=False)
    snapshot.total_memory, snapshot.free_memory = memory.total, memory.free
    try:
        config = EngineArgs(
            model=directory, load_format="dummy", skip_tokenizer_init=True, async_scheduling=False, **arguments
        ).create_engine_config()
        return {
            "requested": request_memory(snapshot, config.cache_config),
            "cache": config.cache_config.kv_cache_memory_bytes,
            "eager": config.model_config.enforce_eager,
            "sleeps": config.model_config.enable_sleep_mode,
            "gives back graphs": config.model_config.sleep_mode_offload_cudagraph,
            "gives back communicators": config.model_config.enable_nccl_comm_suspend,
            "key": config.compute_hash(),
            "workers": config.parallel_config.world_size,
        }
    except Exception as error:  # noqa: BLE001 - told to the test
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    type(current_platform).is_sleep_mode_available = lambda self: True  # as on CUDA
    with open(sys.argv[1], "rb") as file:
        directory, cases = pickle.load(file)
    found = {name: check(directory, *case) for name, case in cases.items()}
    with open(sys.argv[2], "w") as file:
        json.dump(found, file)
