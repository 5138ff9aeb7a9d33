"""A model that speaks as vLLM and as TGI do over HTTP, written for these tests: it draws, tells log-probs, reloads."""

import threading
from pathlib import Path
from typing import Any

import torch
from http_client.servers import Asked, Say
from safetensors.torch import load_file

from verl.models.pretrained import Pretrained
from verl.ops.sampling import filter_logits

MODEL = "the-actor"


class Speaker:
    """Answers for `remote.servers.serving(speaker.post, speaker.page)`.

    Args:
        directory: of the model.
        mode: `raw` log-probs of the model, or `processed` by temperature and truncation.

    Attributes:
        reloads: directories that it was told to read.
        takes_weights: whether it reads them.
        drops: names of tensors that it forgets when it reads.
        is_dev: whether it has the paths for weights.
        tells_ids: whether it gives token ids.
    """

    def __init__(self, directory: Path, mode: str = "raw"):
        described = Pretrained(path=str(directory))
        self.tokenizer, self.mode = described.load_tokenizer(), mode
        self.model: Any = described.load_causal_lm("cpu").eval()
        self.reloads: list[str] = []
        self.takes_weights = self.is_dev = self.tells_ids = self.cache_resets = True
        self.drops: tuple[str, ...] = ()
        self.max_len = 64
        self._lock = threading.Lock()

    def page(self, path: str) -> Any:
        if path == "/v1/models":
            adapter = {"id": "an-adapter", "parent": MODEL}
            return {
                "data": [{"id": MODEL, "root": "/models/a", "parent": None, "max_model_len": self.max_len}, adapter]
            }
        return {"model_id": MODEL, "max_total_tokens": self.max_len} if path == "/info" else "here"

    def post(self, asked: Asked) -> Any:
        with self._lock:
            if asked.path == "/v1/completions":
                return self._completion(asked.body)
            if asked.path == "/generate":
                return self._generated(asked.body)
            return self._managed(asked) if self.is_dev else Say(status=404)

    def _managed(self, asked: Asked) -> Any:
        if asked.path == "/reset_prefix_cache":
            return {"success": self.cache_resets}
        if "method" not in asked.body:
            return Say(status=400, body="Missing 'method'")
        assert asked.body["method"] == "reload_weights"
        directory = asked.body["kwargs"]["weights_path"]
        self.reloads.append(directory)
        if self.takes_weights:
            found = {k: x for file in sorted(Path(directory).glob("*.safetensors")) for k, x in load_file(file).items()}
            kept = {name: tensor for name, tensor in found.items() if name not in self.drops}
            assert not self.model.load_state_dict(kept, strict=False).unexpected_keys
        return {"results": [None]}

    def _completion(self, body: dict[str, Any]) -> Any:
        assert body["model"] == MODEL
        assert body["repetition_penalty"] == 1.0  # or the server takes the model's own
        ids, log_probs, is_cut = self._draw(
            body["prompt"],
            body["max_tokens"],
            0.0 if body["temperature"] == 0 else body["temperature"],
            body["top_k"],
            body["top_p"],
            body.get("seed"),
            body["stop_token_ids"],
            body["min_tokens"],
        )
        choice = {
            "text": self.tokenizer.decode(ids),
            "finish_reason": "length" if is_cut else "stop",
            "logprobs": {"token_logprobs": log_probs, "tokens": [self.tokenizer.decode([i]) for i in ids]},
        }
        if self.tells_ids:
            choice |= {"token_ids": ids, "prompt_token_ids": body["prompt"]}
        if "prompt_logprobs" in body:
            told = self._of_prompt(body["prompt"])
            shown = [{str(i): {"logprob": x}} for i, x in zip(body["prompt"][1:], told, strict=True)]
            choice["prompt_logprobs"] = [None, *shown]
        return {"choices": [choice]}

    def _generated(self, body: dict[str, Any]) -> Any:
        parameters, prompt = body["parameters"], self.tokenizer(body["inputs"])["input_ids"]
        ids, log_probs, is_cut = self._draw(
            prompt,
            parameters["max_new_tokens"],
            parameters.get("temperature", 1.0) if parameters["do_sample"] else 0.0,
            parameters.get("top_k", 0),
            parameters.get("top_p", 1.0),
            parameters.get("seed"),
            [self.tokenizer.eos_token_id],
        )
        tokens = [{"id": i, "text": "", "logprob": x, "special": False} for i, x in zip(ids, log_probs, strict=True)]
        details = {"finish_reason": "length" if is_cut else "eos_token", "tokens": tokens, "prefill": []}
        if parameters["decoder_input_details"]:
            told = [None, *self._of_prompt(prompt)]
            details["prefill"] = [{"id": i, "text": "", "logprob": x} for i, x in zip(prompt, told, strict=True)]
        return {"generated_text": "", "details": details}

    @torch.no_grad()
    def _draw(self, prompt, count, temperature, top_k, top_p, seed, stops, least=0) -> tuple[list, list, bool]:
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        ids: list[int] = []
        log_probs: list[float] = []
        while len(ids) < count:
            logits = self.model(input_ids=torch.tensor([prompt + ids])).logits[:, -1].float()
            raw = logits.log_softmax(-1)
            if len(ids) < least:
                logits = logits.index_fill(1, torch.tensor(stops), float("-inf"))
            if temperature == 0:
                token, told = int(logits.argmax()), raw
            else:
                cut = filter_logits(logits / temperature, top_k=top_k, top_p=top_p)
                token = int(torch.multinomial(cut.softmax(-1)[0], 1, generator=generator))
                told = raw if self.mode == "raw" else cut.log_softmax(-1)
            ids.append(token)
            log_probs.append(float(told[0, token]))
            if token in stops:
                return ids, log_probs, False
        return ids, log_probs, True

    @torch.no_grad()
    def _of_prompt(self, prompt: list[int]) -> list[float]:
        logits = self.model(input_ids=torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        return [float(logits[at, token]) for at, token in enumerate(prompt[1:])]


def gap(actor, rows):
    """Largest distance of what the rollout recorded from what the trainer computes."""
    mask = rows["response_mask"]
    return float((rows["rollout_log_probs"] - actor.compute_log_probs(rows)["old_log_probs"])[mask].abs().max())
