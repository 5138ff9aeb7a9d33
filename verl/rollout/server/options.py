"""Options of `rollout=server`: where the server is, its protocol, and whether it takes new weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import PositiveFloat

from verl.component import component
from verl.http_client.endpoint import Endpoint
from verl.rollout.base import Capability, Rollout


@component
class ServerOptions(Rollout):
    """Generate on an external server, which verl does not start.

    Args:
        endpoint: its address without `/v1`, its key, limits, time-outs and retries; one request is one response.
        protocol: `openai`: /v1/completions with token ids both ways; `tgi`: /generate of Text
            Generation Inference, with prompts as texts.
        model: name of the model on the server; null: the only one that it serves. For `openai`.
        weights: `reload`: after each update the server, in its development mode, reads the new weights from
            `transfer_dir` (`ServerWeightUpdate`), and proves it by log-probs. `fixed`: the server's weights never
            change, so responses come from an increasingly older policy, which `algorithm.correction` can correct for a
            few updates.
        transfer_dir: directory that the trainer and the server both see, for `reload`; null: one in memory
            (/dev/shm), for a server on this machine.
        log_probs: where `rollout_log_probs` come from. `server`: from its answers, if they are
            log_softmax(logits / temperature); `trainer`: from a forward pass of the model that trains; `auto`: from the
            server where that is right, else from the trainer.
        send_seed: send a seed derived from (run seed, step, prompt, sample) with each request, so that a server that
            supports seeds can repeat a response.
        max_gap_nats: largest mean distance between the log-probs of server and trainer on fixed text that counts as
            rounding; null: 0.001 for float32, 0.05 for float16, 0.3 for bfloat16 under `reload`, and 1 under `fixed`,
            where the actor may have moved on. Before the first reload a distance above 1 means another model.
    """

    location: ClassVar[Literal["trainer", "process", "server"]] = "server"
    supports: ClassVar[frozenset[Capability]] = frozenset({"stages", "turns"})

    endpoint: Endpoint
    protocol: Literal["openai", "tgi"] = "openai"
    model: str | None = None
    weights: Literal["reload", "fixed"] = "reload"
    transfer_dir: str | None = None
    log_probs: Literal["auto", "server", "trainer"] = "auto"
    send_seed: bool = True
    max_gap_nats: PositiveFloat | None = None

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if self.endpoint.base_url.rstrip("/").endswith("/v1"):
            yield "endpoint.base_url ends with /v1: give the address without it, http://HOST:PORT."
        if self.weights == "fixed" and self.log_probs == "trainer":
            yield (
                "log_probs is trainer, and weights is fixed: the trainer does not know log-probs of weights that it no "
                "longer has. Set log_probs=server."
            )
        if self.transfer_dir is not None and self.weights == "fixed":
            yield f"transfer_dir is {self.transfer_dir!r}: nothing is transferred where weights is fixed. Set it null."
        if self.protocol == "tgi":
            yield from self._tgi_faults()

    def _tgi_faults(self) -> Iterator[str]:
        if self.weights == "reload":
            yield "weights is reload: TGI has no way to take new weights. Set weights=fixed, or protocol=openai."
        if self.model is not None:
            yield f"model is {self.model!r}: a TGI server has one model. Leave it null."
        for name, unset in (("min_new_tokens", 0), ("stop_token_ids", ())):
            if getattr(self, name) != unset:
                yield f"{name} is {getattr(self, name)!r}: TGI knows nothing like it. Leave it at {unset!r}."
