"""Connects to a server before the first response, and checks that it serves the actor's model with usable log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from verl.component import BuildContext
from verl.errors import ConfigError, RolloutError, faults_below
from verl.http_client.client import HTTPClient
from verl.http_client.request import Request
from verl.models.parallel_info import Autocast
from verl.rollout.base import stop_tokens
from verl.rollout.server.client import LogProbCheck, ServerEngine, probe_rows_for
from verl.rollout.server.options import ServerOptions
from verl.rollout.server.protocols import OpenAIProtocol, SamplingRequest, ServerProtocol, TGIProtocol

ANOTHER_MODEL_NATS = 1.0  # mean distance of log-probs above which a server is assumed to have another model


def checked_engine(
    options: ServerOptions,
    model: Any,
    tokenizer: Any,
    seed: int,
    autocast: Autocast,
    context: BuildContext,
    protocol: ServerProtocol | None = None,
) -> ServerEngine:
    """Check a server and return the engine that uses it.

    Args:
        protocol: of the server; None for the one that `options.protocol` names.
    Raises:
        ConfigError: no server answers, or it cannot be used; says what to change.
    """
    stop_ids = tuple(stop_tokens(model, tokenizer, options.stop_token_ids).tolist())
    with faults_below("rollout"):
        with faults_below("endpoint"):
            client = options.endpoint.build(context)
        update = None
        try:
            _refuse_absence(client)
            protocol = protocol or _protocol(options, client, tokenizer)
            sampling_params = SamplingRequest(
                options.max_new_tokens,
                options.min_new_tokens,
                options.temperature,
                options.top_k,
                options.top_p,
                stop_ids=stop_ids,
                num_tokens=model.config.get_text_config().vocab_size,
            )
            rows = probe_rows_for(protocol, tokenizer, _num_tokens(model, tokenizer))
            probe = LogProbCheck(client, protocol, rows, sampling_params)
            source = _source(options, probe)
            gap = _refuse_another_model(options, probe, model, autocast)
            if options.weights == "reload" and context.rank == 0:  # one process sends the weights of all
                update = protocol.weight_update(client, options.transfer_dir)
                update.check()
            return ServerEngine(options, probe, update, source, gap, sampling_params, model, seed, autocast)
        except BaseException as error:
            client.close()
            if update is not None:
                update.close()
            if isinstance(error, RolloutError):  # of a probe: before the first step it speaks of the setting
                raise ConfigError(f"endpoint.base_url is {options.endpoint.base_url}: {error}") from error
            raise


def _refuse_absence(client: HTTPClient) -> None:
    if (absence := client.absence()) is not None:
        raise ConfigError(f"endpoint.base_url is {client.endpoint.base_url}: no server answers there ({absence}).")


def _protocol(options: ServerOptions, client: HTTPClient, tokenizer: Any) -> ServerProtocol:
    """The protocol that the options name, with the model and the limit that the server reports."""
    if options.protocol == "tgi":
        info = _server_reply(client, "/info", "protocol is tgi")
        return TGIProtocol(tokenizer, _limit(info.get("max_total_tokens") if isinstance(info, dict) else None))
    listed = _server_reply(client, "/v1/models", "protocol is openai")
    cards = listed.get("data") if isinstance(listed, dict) else None
    cards = [card for card in cards or () if isinstance(card, dict) and isinstance(card.get("id"), str)]
    card = _chosen(cards, options.model, client.endpoint.base_url)
    return OpenAIProtocol(card["id"], _limit(card.get("max_model_len")))


def _limit(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _chosen(cards: Sequence[dict[str, Any]], name: str | None, url: str) -> dict[str, Any]:
    """The name of the model to request; adapters (entries with a parent) do not count as models."""
    served = ", ".join(card["id"] for card in cards) or "nothing"
    if name is not None:
        if found := [card for card in cards if card["id"] == name]:
            return found[0]
        raise ConfigError(f"model is {name!r}: the server at {url} serves {served}.")
    whole = [card for card in cards if not card.get("parent")]
    if len(whole) != 1:
        raise ConfigError(f"model is null: the server at {url} serves {served}. Choose one.")
    return whole[0]


class _ServerQuery(Request):
    def __init__(self, path: str):
        self.path, self.answer = path, None

    def read(self, answer: Any) -> None:
        self.answer = answer


def _server_reply(client: HTTPClient, path: str, setting: str) -> Any:
    question = _ServerQuery(path)
    report = client.ask([question])[0]
    assert report is not None
    if report.failure is not None:
        raise ConfigError(f"{setting}: {client.endpoint.url(path)} gives no answer ({report.failure}).")
    return question.answer


def _source(options: ServerOptions, probe: LogProbCheck) -> Literal["server", "trainer"]:
    """Source of log-probs: they must be log_softmax(logits / temperature), without the effect of top_k and
    top_p."""
    is_cut = options.top_k > 0 or options.top_p < 1
    if options.log_probs == "trainer":
        return "trainer"
    if options.temperature == 1 and not is_cut:
        return "server"  # any definition gives the same
    settings = f"temperature is {options.temperature:g}, top_k is {options.top_k}, top_p is {options.top_p:g}"
    is_raw = probe.tells_raw()
    fits = is_raw is (options.temperature == 1) and (is_raw or not is_cut)
    if is_raw is not None and fits:
        return "server"
    if options.log_probs == "auto" and options.weights == "reload":
        return "trainer"
    means = {True: "those at temperature 1", False: "those after its own settings", None: "it does not say which"}
    remedy = {
        True: "temperature=1",
        False: "temperature=1 with a server of raw log-probs"
        if is_cut
        else "temperature=1, or use a server of processed log-probs",
    }[is_raw is True and is_cut]
    raise ConfigError(
        f"{settings}: log-probs must be log_softmax(logits / temperature), and the server's are {means[is_raw]}. "
        f"Set {remedy} (docs/rollout.md, Log-probs)" + (", or log_probs=auto." if options.weights == "reload" else ".")
    )


def _refuse_another_model(options: ServerOptions, probe: LogProbCheck, model: Any, autocast: Autocast) -> float | None:
    """Raise if the server holds another model, before its weights are replaced.

    Returns:
        The mean distance of log-probs of fixed text, in nats; None if the server does not return them.
    """
    theirs = probe.server_log_probs()
    if theirs is None:
        return None
    gap = float(np.abs(theirs - probe.trainer_log_probs(model, autocast)).mean())
    limit = options.max_gap_nats or ANOTHER_MODEL_NATS
    if options.weights == "reload":  # then the setting speaks of what is left after a reload
        limit = max(limit, ANOTHER_MODEL_NATS)
    if not gap <= limit:
        raise ConfigError(
            f"endpoint.base_url is {probe.client.endpoint.base_url}: it serves another model than the actor's: "
            f"log-probs of fixed text differ by {gap:.3g} nats on average, more than {limit:g} (max_gap_nats). Serve "
            f"{model.config._name_or_path or 'the actor'} there."
        )
    return gap


def _num_tokens(model: Any, tokenizer: Any) -> int:
    """Number of token ids that a prompt may contain."""
    return min(model.config.get_text_config().vocab_size, len(tokenizer))
