"""Run by test_vllm_server.py: vLLM's own server, whose processes share what one of them has imported.

    python tests/rollout/server/vllm_server.py --model DIRECTORY ...   as `python -m vllm.entrypoints.openai.api_server`

By itself vLLM starts four interpreters on a CPU (the server, a look at the model's class, the engine, its worker), and
each imports vLLM and torch. Here the latter two are forks of the first, which looks at the class itself.
"""

import multiprocessing
import os
import runpy
import sys

from vllm.utils import system_utils

from verl.rollout.engine_process.process import NAME_VARIABLE


def main() -> None:
    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")  # before anything of vLLM takes it
    from verl.rollout.engine_process.serve import name_shared_memory
    from verl.rollout.vllm.server.engine_server import inspect_here, name_file_store

    name_shared_memory()  # or some of it would be left when the server is ended
    name_file_store(os.environ[NAME_VARIABLE])
    inspect_here(sys.argv[sys.argv.index("--model") + 1])
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
