"""Replay mixing: rows of earlier steps added to those of this one, and the rows that this step adds to the buffer.

generate ─> mixed ────────────> score ─> weights ─> update ─> keep
            + rows of the buffer          < 1 or > 1           new rows into the buffer
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.importance_sampling import reuse_weights
from verl.checkpoint.save.save_request import ExistingFile
from verl.component import BuildContext
from verl.protocol import DataProto
from verl.replay.config import COMPONENT, ReplayRequest, TieredReplay
from verl.storage.config import Storage

if TYPE_CHECKING:
    from verl.replay.buffer import TieredBuffer

_log = logging.getLogger(__name__)


class ReplayMixing:
    """The replay buffer of a run; without a buffer, rows are unchanged.

    Args:
        run: its description; `replay` says how rows are kept, `storage` where the coldest go.
        checkpoints: the run's directory of them, whose rows in the storage are kept.
    Attributes:
        buffer: None without one.
    """

    def __init__(self, run: Any, context: BuildContext, checkpoints: Path):
        self.settings: TieredReplay | None = run.replay
        self.algorithm: Algorithm = run.algorithm
        self._context, self._checkpoints = context, checkpoints
        names = run.trainer.project_name, run.trainer.experiment_name, *([context.job] if context.job else [])
        saves = run.checkpoint  # one that is in the store alone may need rows that no local one does
        self._keeps_all = saves is not None and (saves.upload_interval is not None or saves.cold_storage is not None)
        self._storage: Storage | None = None if run.storage is None else run.storage.below("/".join(names))
        settings = self.settings
        self.buffer: TieredBuffer | None = None if settings is None else self._new_buffer(settings)
        self._rows = self._version = 0  # of the last step, from which the next one's are guessed

    def expect(self, step: int) -> None:
        """Begin to fetch what this step is likely to take."""
        if self.buffer is not None and (request := self._request(step)):
            self.buffer.prefetch(request)

    def mixed(self, rollout: DataProto, step: int, current_version: Callable[[], int]) -> DataProto:
        """Rewarded rows of this step, and behind them the rows of the buffer that it trains on too.

        Args:
            current_version: version of the policy; rows of asynchronous training may be older.
        """
        if self.buffer is None:
            return rollout
        self._rows, self._version = len(rollout), current_version()
        new = rollout.union(_marked(rollout, is_replayed=False))
        if (request := self._request(step)) is None:
            return new
        old = self.buffer.sample(request, rollout.meta_info.get("pad_token_id", 0))
        return new if old is None else DataProto.concat([new, _like(old, new)])

    def weights(self, batch: DataProto) -> tuple[Tensor | None, dict[str, float]]:
        """Weight of each token, [B, T] or None for 1; see `reuse_weights`."""
        weights, metrics = reuse_weights(batch, self.algorithm.correction)
        if self.buffer is None:
            return weights, metrics
        is_old = batch["is_replayed"]
        staleness = (self._version - batch["policy_version"])[is_old].double()
        metrics["replay/old_rows"] = float(is_old.sum())
        if len(staleness):
            metrics |= {
                "replay/staleness_mean": float(staleness.mean()),
                "replay/staleness_max": float(staleness.max()),
            }
        return weights, metrics

    def new(self, batch: DataProto) -> DataProto:
        """The rows that were sampled in this step."""
        return batch if self.buffer is None else batch[~batch["is_replayed"]]

    def keep(self, experience: DataProto, step: int, is_saving: bool) -> dict[str, float]:
        """Put the rows of this step into the buffer; how many it has.

        Args:
            is_saving: a save is in progress, which may need files that the buffer does not.
        """
        if self.buffer is None:
            return {}
        self.buffer.append(self.new(experience), step)
        if not is_saving:
            self.buffer.sweep()
            self._release(self.buffer)
        return self.buffer.stats()

    def state_dict(self) -> dict[str, bytes | ExistingFile]:
        """State for a checkpoint, by file names."""
        return {} if self.buffer is None else self.buffer.state_dict()

    def load_state_dict(self, state: Mapping[str, Path]) -> None:
        """Go on with the rows of a checkpoint, in place of those that are here."""
        saved = next((path.parent for path in state.values()), None)
        if self.settings is None:
            if saved is not None:
                _log.warning("The replay buffer of %s is ignored: replay=off keeps no rows.", saved.parent.name)
            return
        self.close()
        self.buffer = self._new_buffer(self.settings)
        if saved is None:
            _log.warning("The checkpoint has no replay buffer: it starts empty.")
            return
        self.buffer.load_state_dict(saved)
        _log.info("The replay buffer continues with %d rows of %s.", len(self.buffer), saved.parent.name)

    def close(self) -> None:
        """End threads; files stay."""
        if self.buffer is not None:
            self.buffer.close()

    def _new_buffer(self, settings: TieredReplay) -> TieredBuffer:
        from verl.replay.buffer import TieredBuffer  # Arrow is loaded where there is a buffer, and else not
        from verl.replay.remote_tier import RemoteTier

        context = self._context
        assert context.run_dir is not None
        directory = settings.directory_of(context.run_dir)
        cold = None
        if self._storage is not None:
            cold = RemoteTier(
                self._storage.connect(), directory / "cold", settings.fetch_timeout_s, settings.fetch_retry_s
            )
        return TieredBuffer(settings, directory, context.device, context.seed, cold)

    def _request(self, step: int) -> ReplayRequest | None:
        """Old rows for this many new ones; None where the algorithm takes none."""
        share, algorithm = self.algorithm.replay_fraction, self.algorithm
        count = round(self._rows * share / (1 - share))
        if not count:
            return None
        return ReplayRequest(count, step, self._version, algorithm.replay_max_staleness, algorithm.needs_groups)

    def _release(self, buffer: TieredBuffer) -> None:
        """Delete from the store what nothing needs any more; where checkpoints go there too, nothing."""
        if not buffer.released or buffer.cold is None or self._keeps_all:
            buffer.released.clear()
            return
        from verl.replay.shard import FILE, read_saved

        saved = []
        for file in self._checkpoints.glob(f"*/{COMPONENT}/{FILE}"):
            with suppress(FileNotFoundError):  # pruned meanwhile
                saved.append(read_saved(file))
        needed = {file.name for contents in saved for file in contents.shards if file.place == "cold"}
        buffer.cold.delete(name for name in buffer.released if name not in needed)
        buffer.released = [name for name in buffer.released if name in needed]


def _marked(rows: DataProto, is_replayed: bool) -> DataProto:
    return DataProto.from_dict({"is_replayed": torch.full((len(rows),), is_replayed)})


def _like(old: DataProto, new: DataProto) -> DataProto:
    """Rows of the buffer with the fields of this step's rows, in separate groups."""
    tensors = {**old.batch, "group_ids": old["group_ids"] + 1 + int(new["group_ids"].max())}
    if "routed_experts" in new and "routed_experts" not in old:  # sampled without recorded experts
        shape = (*old["responses"].shape, *new["routed_experts"].shape[2:])
        tensors["routed_experts"] = torch.full(shape, -1, dtype=new["routed_experts"].dtype)
    if "token_versions" in new:
        tensors["token_versions"] = old["policy_version"][:, None].expand(old["responses"].shape)
    empty = np.full(len(old), None, dtype=object)  # another reward may have more columns than the previous one
    tensors = {name: tensors[name].to(new[name].device) for name in new.batch if name != "is_replayed"}
    columns = {name: old.non_tensor_batch.get(name, empty) for name in new.non_tensor_batch}
    rows = DataProto.from_dict(tensors, columns, ragged=old.ragged)
    return rows.union(_marked(rows, is_replayed=True))
