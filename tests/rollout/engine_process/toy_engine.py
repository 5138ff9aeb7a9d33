"""An engine of one's own in a process of its own: a model of transformers, decoded one token and one turn at a time."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from verl.component import BuildContext, component
from verl.models.parallel_info import Autocast
from verl.rollout.base import ALONE, RolloutEngine, TurnRequest
from verl.rollout.engine_process.messages import EngineInfo, EngineSetup, TurnOutput
from verl.rollout.engine_process.options import ProcessOptions
from verl.rollout.engine_process.process import EngineFiles
from verl.rollout.model_log_probs import trainer_log_probs
from verl.rollout.process_engine import ProcessEngine
from verl.rollout.proof import VerifyReply, VerifyRequest, fingerprint
from verl.rollout.token_sampler import TokenSampler
from verl.rollout.weight_sync.stream import Feed, StreamReader
from verl.utils.progress import report


@component
class ToyRollout(ProcessOptions):
    """Generate by `ToyServer`.

    Args:
        skips: name of a tensor that the engine does not load after its first sync.
    """

    skips: str | None = None

    def attach(
        self, model: Any, tokenizer: Any, seed: int, autocast: Autocast = None, context: BuildContext = ALONE
    ) -> RolloutEngine:
        return ToyEngine(self, model, tokenizer, seed, autocast, context)


class ToyEngine(ProcessEngine):
    """The trainer's side."""

    options: ToyRollout

    def set_up(
        self, files: EngineFiles, autocast: Autocast, context: BuildContext, gpus: Sequence[str] | None
    ) -> EngineSetup:
        self.model.config.save_pretrained(files.directory)
        environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
        setting = ToySetting(str(files.directory), self.model.dtype, self.options.skips)
        server = "rollout.engine_process.toy_engine:ToyServer"
        return EngineSetup("toy", server, setting, environment, self.model.dtype)


@dataclass(frozen=True)
class ToySetting:
    directory: str
    dtype: torch.dtype
    skips: str | None


class ToyServer:
    """The engine in its process."""

    def __init__(self, setting: ToySetting):
        config = AutoConfig.from_pretrained(setting.directory)
        self.setting, self.num_loads, self.waiting = setting, 0, list[TurnRequest]()
        self.model = AutoModelForCausalLM.from_config(config, dtype=setting.dtype).eval().requires_grad_(False)

    def describe(self) -> EngineInfo:
        return EngineInfo(self.model.config.max_position_embeddings, num_workers=1)

    def lost_worker(self) -> str | None:
        return None

    def connect(self, feeds: list[Feed], dtype: torch.dtype) -> None:
        self.feed, self.dtype = feeds[0], dtype
        self.reader = StreamReader(self.feed.handle)

    def load(self, num_threads: int, in_place: bool) -> tuple[float, None]:
        start, held = time.perf_counter(), dict(self.model.named_parameters(remove_duplicate=False))
        for number, entries in enumerate(self.feed.chunks):
            for name, tensor in self.reader.chunk(number, entries, self.dtype):
                if not self.num_loads or name != self.setting.skips:
                    held[name].copy_(tensor)
            self.reader.leave(number)
        self.num_loads += 1
        return time.perf_counter() - start, None

    def prove(self, question: VerifyRequest) -> VerifyReply:
        named = self.model.named_parameters(remove_duplicate=False)
        held = {name: fingerprint(tensor, question.vectors) for name, tensor in named}
        log_probs = trainer_log_probs(self.model, question.rows) if question.rows else torch.zeros(0).numpy()
        return VerifyReply(held, log_probs)

    def sleep(self) -> None:
        self.model.to("meta")

    def wake(self, what: str) -> None:
        if what == "weights":
            self.model.to_empty(device="cpu").tie_weights()
            self.model.model.rotary_emb = type(self.model.model.rotary_emb)(self.model.config)

    def begin_turns(self, sampler: TokenSampler, width: int, num_threads: int | None, is_stepwise: bool) -> None:
        self.sampler, self.waiting = sampler, []

    def end_turns(self) -> None:
        self.waiting = []

    def advance_turns(self, new: list[TurnRequest], budget_s: float, until_all: bool) -> TurnOutput:
        self.waiting += new
        output = TurnOutput()
        while self.waiting and (until_all or not output.episodes):
            turn = self.waiting.pop(0)
            tokens, log_probs = self._decode(turn)
            output.episodes.append(turn.episode)
            output.tokens.append(tokens)
            output.log_probs.append(log_probs)
        return output

    def _decode(self, turn: TurnRequest) -> tuple[list[int], list[float]]:
        sampler, tokens, log_probs = self.sampler, list[int](), list[float]()
        while len(tokens) < turn.max_new_tokens and not (tokens and tokens[-1] in sampler.stop_ids):
            report()
            logits = self.model(input_ids=torch.tensor([[*turn.tokens, *tokens]])).logits[:, -1]
            noise = sampler.noise(torch.tensor(turn.noise_key)[:, None], len(tokens))
            token = sampler.pick(logits, noise, len(tokens), turn.greedy)
            tokens.append(int(token))
            log_probs.append(float(sampler.log_probs(logits, token)))
        return tokens, log_probs
