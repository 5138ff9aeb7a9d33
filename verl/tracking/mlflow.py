"""Metrics to MLflow: a tracking server, or files in a directory."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from verl.component import BuildContext, component
from verl.tracking.base import ContinuedTracker, TrackerDescription
from verl.utils.external_input import plain

BATCH_METRICS, BATCH_PARAMS, LONGEST_PARAM = 1000, 100, 6000  # limits of MLflow; the last one in characters
MOST_WAITING = 100_000  # metrics kept while a server does not answer; the oldest are dropped first
STATUSES = {"finished": "FINISHED", "stopped": "FINISHED", "failed": "FAILED", "restarting": "SCHEDULED"}

_log = logging.getLogger(__name__)


@component
class MLflow(TrackerDescription):
    """Logs to an MLflow run: metrics, settings as parameters, samples as JSON artifacts.

    A resumed run continues the run of its parent. Metrics that a server did not take are sent with the next ones.

    Args:
        experiment: MLflow experiment, which is created if it does not exist.
        tracking_uri: an address, or `file:DIR`; null uses MLFLOW_TRACKING_URI if it is set, else `mlruns` here.
        timeout_s: of a request, which is tried twice; training waits for it. MLFLOW_HTTP_REQUEST_TIMEOUT and
            MLFLOW_HTTP_REQUEST_MAX_RETRIES replace these limits.
    """

    package: ClassVar[str] = "mlflow"

    experiment: Annotated[str, Field(min_length=1)] = "verl"
    tracking_uri: str | None = None
    timeout_s: Annotated[int, Field(gt=0, lt=10**6)] = 10

    def build(self, context: BuildContext) -> MLflowTracker:
        return MLflowTracker(self)


class MLflowTracker(ContinuedTracker):
    """An MLflow run. `@` in the name of a metric becomes `_at_`, other characters that MLflow refuses become `_`."""

    def __init__(self, settings: MLflow):
        self._settings = settings
        self._run_id: str | None = None
        self._waiting: list[Any] = []
        self.num_lost = 0

    def identity(self) -> dict[str, Any]:
        return {} if self._run_id is None else {"run_id": self._run_id}

    def start(self, run_name: str, config: dict[str, Any], run_dir: Path, total_steps: int | None) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the only store of this package without a server
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(self._settings.timeout_s))
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        mlflow = importlib.import_module("mlflow")
        uri = self._settings.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or Path("mlruns").absolute().as_uri()
        self._entities, self._client = mlflow.entities, mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
        if (former := self.former.get("run_id")) is not None:
            try:
                self._client.update_run(former, status="RUNNING")
                self._run_id = former
                return  # its parameters cannot be changed
            except mlflow.MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                _log.warning("MLflow run %s of the resumed run is not in this store: a new run begins", former)
        experiment = self._client.get_experiment_by_name(self._settings.experiment)
        experiment_id = (
            self._client.create_experiment(self._settings.experiment)
            if experiment is None
            else experiment.experiment_id
        )
        self._run_id = self._client.create_run(experiment_id, run_name=run_name).info.run_id
        params = [self._entities.Param(path, value) for path, value in _params(config, "")]
        for start in range(0, len(params), BATCH_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + BATCH_PARAMS])

    def log(self, metrics: dict[str, float], step: int) -> None:
        now_ms = int(time.time() * 1000)
        self._waiting += [self._entities.Metric(_name(key), value, now_ms, step) for key, value in metrics.items()]
        self._drop(len(self._waiting) - MOST_WAITING)
        self._send()

    def samples(self, rows: list[dict[str, Any]], step: int, name: str) -> None:
        text = json.dumps(plain(rows), indent=1, ensure_ascii=False)
        self._client.log_text(self._run_id, text, f"samples/{name}_step_{step}.json")

    def close(self, status: str) -> None:
        if self._run_id is None:
            return
        try:
            self._send()
        finally:
            self._drop(len(self._waiting))
            self._client.set_terminated(self._run_id, STATUSES.get(status, "KILLED"))

    def _send(self) -> None:
        while self._waiting:
            self._client.log_batch(self._run_id, metrics=self._waiting[:BATCH_METRICS])
            del self._waiting[:BATCH_METRICS]

    def _drop(self, number: int) -> None:
        self.num_lost = (self.num_lost or 0) + max(0, number)
        del self._waiting[: max(0, number)]


def _name(key: str) -> str:
    return re.sub(r"[^A-Za-z0-9_\-. :/]", "_", key.replace("@", "_at_"))


def _params(tree: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """Settings by path, each as text; the start of one that is too long."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _params(value, f"{path}{key}.")
        else:
            yield _name(f"{path}{key}"), str(value)[:LONGEST_PARAM]
