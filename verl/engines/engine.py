"""The training engine: inference and optimizer steps over micro-batches, equal to one big batch.

    forward_backward(batch, loss)   gradients, accumulated over micro-batches and over calls
    optim_step()                    summed over processes, clipped, applied

A role passes the engine a function from (model, micro-batch) to tensors or to a loss. The engine splits the rows into
micro-batches and reduces results over the processes of the role. Results do not depend on the split.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from verl.engines.optimizer import AdamW
from verl.engines.parallel_dims import Parallelism
from verl.errors import ConfigError, NoGradients
from verl.model_paths.check import exempt_from_determinism, paths_for
from verl.model_paths.expert_routing import ExpertLoad, defines_balance_loss, routing_of
from verl.model_paths.families import PLAIN, ModelPaths, Scoring
from verl.model_paths.images import ImageRows, has_images, with_images
from verl.model_paths.micro_batch import MicroBatch, cut_into_micro_batches, empty_micro_batch
from verl.models.heads import LMHead
from verl.models.parallel_info import Autocast, compute_device, computing_in, release_gathered
from verl.models.structure import call_model, unwrapped
from verl.ops.masking import LossTotals
from verl.ops.resharding.dtensor import ReadableTensor, at_stage_of, is_on_other_stage, read_slice_like
from verl.protocol import DataProto
from verl.utils.memory import release_cached
from verl.utils.progress import report

BLOCK_MULTIPLE = 64  # attention lengths on a GPU are rounded up to it: few distinct shapes, aligned for the kernels

Compute = Callable[[nn.Module, MicroBatch], dict[str, Tensor]]
Packs = Literal["auto", "off"]
Loss = Callable[[nn.Module, MicroBatch, LossTotals], tuple[Tensor, dict[str, Tensor]]]


class TrainingEngine:
    """One process's share of a model: all of it, unless a sharding says otherwise.

    Args:
        model: called by the functions that the roles pass.
        parallel: the position of this process in the mesh, and its collective operations.
        micro_batch_tokens: the most tokens of a forward pass, padding included.
        optimizer: None for a model that is used for inference only.
        total_updates: optimizer steps of the whole run, for the learning-rate schedule.
        autocast: the dtype that the model computes in; None for the dtype of its weights.
        packing: whether rows may be packed into one line of tokens, with a shared prompt computed once. `auto` packs
            where packing was verified for the model (`verl.model_paths`) and saves a clear share of the tokens; `off`
            never packs. Results differ by rounding only.
    """

    def __init__(
        self,
        model: nn.Module,
        parallel: Parallelism,
        micro_batch_tokens: int,
        optimizer: AdamW | None = None,
        total_updates: int = 0,
        autocast: Autocast = None,
        packing: Packs = "auto",
    ):
        self.model = model
        self.parallel = parallel
        self.micro_batch_tokens = micro_batch_tokens
        self.updates = 0
        self.total_updates = total_updates
        self.optimizer_config: Any = optimizer
        release_gathered(model)
        named = dict(model.named_parameters())  # a forward pass replaces sharded parameters by gathered ones
        self.parameters = {name: p for name, p in named.items() if not is_on_other_stage(p)}
        self._elsewhere = {name: p for name, p in named.items() if is_on_other_stage(p)}
        self.optimizer: Any = None if optimizer is None else optimizer.attach(self.parameters.values())
        self.device = compute_device(model)
        if self.device.type != "cpu":
            exempt_from_determinism(unwrapped(getattr(model, "backbone", model)))
        self.autocast: Autocast = autocast
        self.packing = packing
        assert parallel.context is None or packing != "off", "processes that share tokens run them as a packed line"
        self._limit: Scoring | None = None
        self.routing = routing_of(getattr(model, "backbone", model)) if parallel.routers_are_whole else None
        self.replays_routing = False
        self._balance_coef = 0.0
        self._head: LMHead | None = None
        self._shares: dict[str, Tensor] | None = None  # sums of this process since the last optimizer step
        self._expert_load: Tensor | None = None

    @torch.no_grad()
    def infer(
        self, batch: DataProto, compute: Compute, *, alone: bool = False, replays: bool | None = None
    ) -> dict[str, Tensor]:
        """Run a function of the model over a batch without gradients.

        Args:
            batch: see `cut_into_micro_batches`.
            compute: returns named per-token tensors [b t ...] for a micro-batch.
            alone: run each row in a separate forward pass, without packing.
            replays: route tokens to the experts that they were sampled with; None for the setting of the engine.
        Returns:
            The named tensors as [B T ...] on the device of the batch, zero where the response mask is off. Empty for a
            batch without rows, which a process gets when there are fewer rows than processes.
        """
        self.model.eval()
        mask = batch.batch["response_mask"]
        results: dict[str, Tensor] = {}

        def infer_one(micro: MicroBatch) -> None:
            if self.routing is not None:
                self.routing.begin(micro, replays=self.replays_routing if replays is None else replays)
            scores = compute(self.model, micro)
            rows = micro.rows.to(self.device, non_blocking=True)
            for name, x in scores.items():  # together on the device until the last: none waits for the one before
                off = ~micro.tensors["response_mask"]
                x = x.masked_fill(off.view(*off.shape, *[1] * (x.dim() - 2)), 0)
                whole = results.setdefault(name, x.new_zeros(*mask.shape, *x.shape[2:]))
                if len(rows):
                    whole[rows, : x.shape[1]] = x

        micros = self.micro_batches(batch, alone)
        self.parallel.run_micro_batches(micros, infer_one, self._computing, model=self.model)
        release_gathered(self.model)
        if self.routing is not None:
            self.routing.end(self.device)
        return {name: x.to(mask.device) for name, x in self.parallel.from_last_stage(results).items()}

    def forward_backward(self, batch: DataProto, loss: Loss) -> LossTotals:
        """Accumulate the gradient of a loss on this process's share of the rows of a batch.

        After several calls `optim_step` takes the gradient of the sum of their losses, each divided by the totals of
        its own batch. After a call that raised, accumulation starts over.

        Args:
            batch: see `cut_into_micro_batches`; it may be empty as long as another process has rows.
            loss: returns the share of a micro-batch in the loss and in each metric, both divided by the totals of the
                whole batch that it receives, so that summing over micro-batches and processes gives the loss.
        Returns:
            Those totals.
        """
        assert self.optimizer is not None, "this engine only infers"
        local = LossTotals.of(batch.batch["response_mask"], batch.batch.get("episode_tokens"))
        totals = LossTotals(**self.parallel.sums({"tokens": local.tokens, "sequences": local.sequences}))
        if self.routing is not None and self._balance_coef:
            self.routing.balance(self._load_of(batch))
        self.model.train(self.paths(batch).trains)
        shares, self._shares = self._shares, None  # until this call has succeeded
        if shares is None:
            self.optimizer.zero_grad(set_to_none=True)
            shares, self._expert_load = {}, None

        def loss_of_one(micro: MicroBatch) -> Tensor:
            if self.routing is not None:
                self.routing.begin(micro, replays=self.replays_routing, counts=True)
            value, stats = loss(self.model, micro, totals)
            if self.routing is not None and self._balance_coef:
                stats["router_aux_loss"] = self.routing.balance_loss()
                value = value + self._balance_coef * stats["router_aux_loss"].to(value.dtype)
            if "plant_nan" in batch.meta_info:  # fault injection; see verl.trainer.guards
                value = value * math.nan
            for name, x in {"loss": value, **stats}.items():
                shares[name] = shares.get(name, 0.0) + x.detach().double()
            return value

        self.parallel.run_micro_batches(
            self.micro_batches(batch), loss_of_one, self._computing, model=self.model, trains=True
        )
        if self.routing is not None:
            load = self.routing.end(self.device).tensors()
            self._expert_load = load if self._expert_load is None else self._expert_load + load
            self.routing.balance(None)
        self._shares = shares
        return totals

    def optim_step(self) -> dict[str, float]:
        """One optimizer step with the gradients of `forward_backward`.

        Returns:
            Metrics of the whole batch, with `loss`, `grad_norm` (before clipping) and `lr`. If one of them is not
            finite, the step is skipped: weights, optimizer and schedule are unchanged. All processes have the same
            metrics and therefore take the same decision.
        Raises:
            NoGradients: no `forward_backward` came before it, or `release` has freed its gradients.
        """
        shares, self._shares = self._shares, None
        if shares is None:
            raise NoGradients("optim_step has no gradients: call forward_backward before each optim_step.")
        self.parallel.sum_gradients(self.parameters.values())
        local = torch.stack(list(shares.values())).tolist() if shares else []  # one transfer from the device
        metrics = self.parallel.sums(dict(zip(shares, local, strict=True)))
        metrics["grad_norm"] = float(self.parallel.clip(self.parameters.values(), self.optimizer_config.max_grad_norm))
        if self.routing is not None and self._expert_load is not None:
            metrics |= ExpertLoad.metrics(self.parallel.sum_of_tokens(self._expert_load), self.routing.layers)
        lr = self.optimizer_config.learning_rate(self.updates, self.total_updates)
        if not all(math.isfinite(x) for x in metrics.values()):
            self.optimizer.zero_grad(set_to_none=True)
            return {**metrics, "lr": lr}
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        report()
        self.updates += 1
        if self.device.type != "cpu":  # frees memory for generation and for other roles
            self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            metrics["peak_gpu_memory_mib"] = self.parallel.most(torch.cuda.max_memory_allocated(self.device)) / 2**20
        return {**metrics, "lr": lr}

    def update(self, batch: DataProto, loss: Loss) -> dict[str, float]:
        """One optimizer step on a batch: `forward_backward` and `optim_step`."""
        self.forward_backward(batch, loss)
        return self.optim_step()

    def release(self) -> None:
        """Free the gradients and the caching allocator's unused memory, for generation and for other roles."""
        self._shares = None
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        release_cached(self.device)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimizer's state as live tensors, named after the parameters; empty before the first step.

        The state of parameters that other pipeline stages hold is present as tensors without data.
        """
        tensors = {
            f"{name}.{key}": at_stage_of(parameter, value)
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        if not self._elsewhere or not tensors:
            return tensors
        keys = {name.rpartition(".")[2]: x for name, x in tensors.items()}
        for name, parameter in self._elsewhere.items():
            if parameter.requires_grad:
                for key, x in keys.items():
                    held = torch.empty_like(parameter) if x.ndim else torch.empty((), dtype=x.dtype, device="meta")
                    tensors[f"{name}.{key}"] = at_stage_of(parameter, held)
        return tensors

    def load_optimizer(self, tensors: Mapping[str, ReadableTensor], updates: int) -> None:
        """Restore the state that `optimizer_tensors` returned.

        Args:
            tensors: unsharded tensors by name, or lazy ones that read from disk when indexed; the part that this
                process holds is taken from each.
            updates: optimizer steps made when the state was saved.
        Raises:
            ValueError: names or shapes do not match the parameters of this model.
        """
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        elsewhere = {name for name, p in self._elsewhere.items() if p.requires_grad}
        unmatched = {name.rpartition(".")[0] for name in tensors} ^ (trained.keys() | elsewhere)
        if tensors and unmatched:
            raise ValueError(f"the optimizer's state does not match the parameters: {', '.join(sorted(unmatched)[:5])}")
        for name, tensor in tensors.items():
            if name.rpartition(".")[0] in elsewhere:
                continue
            parameter, key = trained[name.rpartition(".")[0]], name.rpartition(".")[2]
            ndim = len(tensor.shape)
            if ndim and tensor.shape != parameter.shape:
                saved_shape, shape = list(tensor.shape), list(parameter.shape)
                raise ValueError(f"the optimizer's state {name} has shape {saved_shape}, its parameter has {shape}")
            self.optimizer.state[parameter][key] = (
                read_slice_like(parameter, tensor) if ndim else tensor[()].to(parameter.device, copy=True)
            )
            report()
        self.updates = updates

    def micro_batches(self, batch: DataProto, alone: bool = False) -> Iterator[MicroBatch]:
        """A batch in parts of at most the token budget, or row by row."""
        batch = batch.to("cpu")  # reading the lengths must not wait for the device
        budget, paths = (1, PLAIN) if alone else (self._token_budget(batch), self.paths(batch))
        multiple = 1 if self.device.type == "cpu" else BLOCK_MULTIPLE
        images = ImageRows(getattr(self.model, "backbone", self.model)) if has_images(batch) else None
        context = None if alone else self.parallel.context
        cuts = cut_into_micro_batches(batch, budget, paths, context, multiple, images)
        if not self.parallel.needs_equal_micro_batches:
            yield from (micro.to(self.device) for micro in cuts)
            return
        cut = list(cuts)
        most = self.parallel.most(len(cut))  # a collective, so before the first micro-batch
        yield from (micro.to(self.device) for micro in cut)
        yield from (empty_micro_batch(batch).to(self.device) for _ in range(most - len(cut)))

    def _token_budget(self, batch: DataProto) -> int:
        """Tokens of a micro-batch: at most the configured number, and few enough to keep all pipeline stages busy."""
        if self.parallel.least_micro_batches == 1:
            return self.micro_batch_tokens
        shared = 1 if self.parallel.context is None else self.parallel.context.size
        tokens = -(-int(batch.batch["attention_mask"].sum()) // shared)  # per process
        return max(1, min(self.micro_batch_tokens, -(-tokens // self.parallel.least_micro_batches)))

    def paths(self, batch: DataProto) -> ModelPaths:
        """The execution paths verified for this model at these row lengths and allowed by the settings."""
        tokens = batch.batch["attention_mask"].sum(dim=1)
        model, longest = getattr(self.model, "backbone", self.model), int(tokens.max()) if len(batch) else 0
        paths = paths_for(model, longest, shares_tokens=self.parallel.shares_tokens)
        if self._limit is not None:
            paths = paths.limited_to(self._limit)
        if has_images(batch):
            paths = with_images(paths, model)
        return paths.limited_to("padded") if self.packing == "off" else paths

    def replay_routing(self, name: str) -> None:
        """Route sampled tokens to the experts recorded during rollout from now on, where a batch has them.

        Args:
            name: configuration path of the model, for messages.
        Raises:
            ConfigError: the model has no experts, or its routers cannot be overridden.
        """
        if self.routing is None:
            raise ConfigError(
                f"rollout.router_replay is true: {name} has no expert routers that every process runs in full. Set "
                "rollout.router_replay=false."
            )
        self.routing.prove_replay(name)
        self.replays_routing = True

    def balance_routers(self, coef: float, head: LMHead) -> None:
        """Add the load balancing loss of the routers, over all rows of an update, to every loss from now on.

        The loss depends on the expert load of the whole update, so each update costs one more forward pass.

        Args:
            coef: weight of the loss; 0 for none.
            head: output head of the model.
        Raises:
            ConfigError: transformers defines no such loss for the model.
        """
        model = self.model
        if coef and (self.routing is None or not defines_balance_loss(model)):
            raise ConfigError(
                f"actor.router_aux_loss_coef is {coef:g}: transformers defines no load balancing loss for a "
                f"{type(unwrapped(model)).__name__}, or a process does not see all routers (tp, pp). Set it to 0."
            )
        self._balance_coef, self._head = coef, head

    @torch.no_grad()
    def _load_of(self, batch: DataProto) -> Tensor:
        """`ExpertLoad.tensors` of a batch, summed over all processes."""
        routing, head = self.routing, self._head
        assert routing is not None
        assert head is not None

        def last_states(logits_to_keep: int = 0, **inputs: Any) -> Tensor:
            return call_model(self.model, **inputs, use_cache=False, logits_to_keep=logits_to_keep).logits

        def count_one(micro: MicroBatch) -> None:
            routing.begin(micro, replays=self.replays_routing, counts=True)
            with head.left_out() if head.is_separable else contextlib.nullcontext():
                micro.predict(last_states)

        self.parallel.run_micro_batches(self.micro_batches(batch), count_one, self._computing, model=self.model)
        release_gathered(self.model)
        return self.parallel.sum_of_tokens(routing.end(self.device).tensors())

    def limit(self, scoring: Scoring) -> None:
        """Restrict the execution paths, after the check on the first batch found a faster one to be wrong."""
        self._limit = scoring

    def _computing(self) -> AbstractContextManager[None]:
        return computing_in(self.autocast, self.model)
