"""vLLM among the engines in processes of their own: how it is set up, and what its errors mean."""

from __future__ import annotations

from collections.abc import Sequence

from verl.component import BuildContext
from verl.models.parallel_info import Autocast
from verl.rollout.engine_process.messages import EngineSetup
from verl.rollout.engine_process.process import EngineError, EngineFiles
from verl.rollout.process_engine import ProcessEngine
from verl.rollout.vllm.engine_args import as_config_error, as_death, engine_args, environment, write_model_directory
from verl.rollout.vllm.options import VLLMOptions

SERVER = "verl.rollout.vllm.server.engine_server:EngineServer"


class VLLMEngine(ProcessEngine):
    """The running engine of `VLLMRollout`; see `ProcessEngine`."""

    options: VLLMOptions

    def set_up(
        self, files: EngineFiles, autocast: Autocast, context: BuildContext, gpus: Sequence[str] | None
    ) -> EngineSetup:
        directory = write_model_directory(self.model, files.directory)
        room = context.trainer_bytes
        args = engine_args(self.options, self.model, autocast, directory, files.name, room)
        variables = environment(self.options, context, args.num_threads, args.dtype, gpus)
        variables["VLLM_RPC_BASE_PATH"] = str(files.temporary)  # for sockets
        return EngineSetup(
            "vLLM", SERVER, args, variables, args.dtype, args.num_threads, args.is_on_gpu, args.lora_rank
        )

    def start_error(self, error: EngineError) -> Exception:
        return as_death(error) or as_config_error(error, self.setup.setting, self.model)
