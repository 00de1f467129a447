# SPDX-License-Identifier: Apache-2.0
"""One training worker: statistics, updates, validation, checkpoints; and going on exactly where it stopped."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from kvcache.settings import Settings, TrainingSettings
from kvcache.target import TargetLLM
from pipelines.training.curve import Curve
from pipelines.training.groups import Chunk, TokenGroup, arrange, epoch_order
from pipelines.training.initial import Parent, initial_network, lineage
from pipelines.training.objectives import ScoresAndValues, document_loss, objective
from pipelines.training.optimizers import make_optimizers
from pipelines.training.pairs import PairSource, TrainingPair
from pipelines.training.scores import ScoreMoments
from pipelines.training.state import Progress, load_state, save_state
from pipelines.training.statistics import Statistics, measure
from pipelines.training.validation import Validation, validate
from repair.checkpoint import save_checkpoint

STATE_FILE = "state.safetensors"
CURVE_FILE = "curve.jsonl"
_ROW_MULTIPLE = 64
_SCORE_GROUPS = 32
"""Most groups whose queries are measured for the QK/V objective: each takes another pass of the target."""


@dataclass(frozen=True)
class TrainingJob:
    """What is trained, on what, for how long, and where it goes.

    Attributes:
        training: groups to train on.
        validation: groups never trained on.
        header: the header chunk, which every example begins with; empty for none.
        size: a key of `repair.network.SIZES`.
        updates: length of the run, and horizon of the learning rate.
        output: directory of checkpoint, state and curve; every worker sees it.
        parent: the checkpoint to begin with; None begins with a fresh network.
    """

    training: list[TokenGroup]
    validation: list[TokenGroup]
    header: Chunk
    size: str
    updates: int
    output: Path
    parent: Parent | None = None

    def digest(self, fingerprint: str, settings: TrainingSettings) -> str:
        """SHA-256 over all that decides the numbers of a run."""
        free = {"cache_dir", "cache_bytes", "checkpoint_every", "validate_every", "workers", "header_chunk"}
        parts = [fingerprint, settings.model_dump(exclude=free), self.size, self.updates, self.header]
        parts += [[group.name, group.chunks] for group in (*self.training, *self.validation)]
        parts += [self.parent.weights_sha256] if self.parent is not None else []
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Trainer:
    """Trains one repair network; several of them, one per worker, share the groups of each update.

    Args:
        target: the target LLM.
        job: what to do.
        settings: `settings.training` is the recipe.
        rank, world: this worker, of how many; more than one needs an initialised process group.
    """

    def __init__(self, target: TargetLLM, job: TrainingJob, settings: Settings, rank: int = 0, world: int = 1) -> None:
        self._recipe = settings.training
        if self._recipe.groups_per_update < world:
            raise ValueError(
                f"training.groups_per_update ({self._recipe.groups_per_update}) is less than the {world} workers"
            )
        self._target, self._job, self._rank, self._world = target, job, rank, world
        self._model = settings.target.model
        self._pairs = PairSource(target, settings)
        self._digest = job.digest(target.fingerprint, self._recipe)
        self._loss = objective(self._recipe, target.geometry).to(target.device)
        self.network = initial_network(target, job.size, self._recipe, job.parent)
        self._parameters = [p for p in self.network.parameters() if p.requires_grad]
        self._optimizers = make_optimizers(self.network, self._recipe)
        self._curve = Curve(job.output / CURVE_FILE)

    def run(self) -> None:
        """Train to the end, from the start or from the saved state.

        Raises:
            StateError: the state cannot be read or written, or belongs to another run.
            FloatingPointError: the loss is not finite any more.
        """
        saved = load_state(self._job.output / STATE_FILE, self.network, self._loss, self._optimizers, self._digest)
        if saved is None:
            self._set_statistics()
            saved = Progress(self._digest, 0)
        update, best = saved.update, saved.best
        self._weight = self.statistics.weight.to(self._target.device)
        if self._rank == 0:
            self._curve.begin(update)
            if self._job.parent is not None and update == 0:  # the best so far is the parent
                found = self._validate(update)
                best = found.repaired.nmse
                self._publish(update, found)
        while update < self._job.updates:
            self._curve.add(self._update(update), write=self._rank == 0)
            update += 1
            last = update == self._job.updates
            if self._rank == 0:
                if update % self._recipe.validate_every == 0 or last:
                    found = self._validate(update)
                    if best is None or found.repaired.nmse < best:
                        best = found.repaired.nmse
                        self._publish(update, found)
                if update % self._recipe.checkpoint_every == 0 or last:
                    self.checkpoint(update, best)

    @property
    def statistics(self) -> Statistics:
        """What normalises, in host memory."""
        sigmas = self.network.sigma_stale.cpu(), self.network.sigma_delta.cpu()
        return Statistics(*sigmas, floor=self._recipe.residual_floor)

    def training_pairs(self) -> Iterator[TrainingPair]:
        """The training groups, each in its first arrangement."""
        return (self._pair(group, 0) for group in self._job.training)

    def checkpoint(self, update: int, best: float | None) -> None:
        """Save the state after that many updates.

        Raises:
            StateError: it could not be written; the one before is intact.
        """
        progress = Progress(self._digest, update, best)
        save_state(self._job.output / STATE_FILE, self.network, self._loss, self._optimizers, progress)

    def _set_statistics(self) -> None:
        if self._job.parent is None:
            sums = measure(self._share(self._recipe.statistics_groups), tuple(self.network.sigma_stale.shape))
            self._add_up(sums.stale, sums.residual, sums.tokens)
            statistics = sums.statistics(self._recipe.residual_floor)
            self.network.sigma_stale.copy_(statistics.sigma_stale)
            self.network.sigma_delta.copy_(statistics.sigma_delta)
        if isinstance(self._loss, ScoresAndValues):
            moments = ScoreMoments(self._target, self._recipe.seed)
            for pair in self._share(min(_SCORE_GROUPS, self._recipe.statistics_groups)):
                moments.add(pair)
            self._add_up(moments.queries, moments.residual)
            self._loss.metric.copy_(moments.metric(self.statistics))

    def _share(self, groups: int) -> Iterator[TrainingPair]:
        """This worker's share of the first training groups, each in its first arrangement."""
        return (self._pair(group, 0) for group in self._job.training[:groups][self._rank :: self._world])

    def _add_up(self, *tensors: torch.Tensor) -> None:
        """Add those of all workers, in place."""
        if self._world > 1:
            for tensor in tensors:
                there = tensor.to(self._target.device)  # NCCL adds nothing that is in host memory
                dist.all_reduce(there)
                if there is not tensor:
                    tensor.copy_(there)

    def _update(self, update: int) -> dict[str, Any]:
        begin = time.perf_counter()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss_sum, tokens = torch.zeros(()), 0
        for pair in self._batch(update):
            with self._network_precision():
                predicted = self._predict(pair)
                true = pair.residual.to(predicted.device) / self.network.sigma_delta
                loss = document_loss(predicted, true, self._weight, self._loss) / self._recipe.groups_per_update
                loss.backward()
            loss_sum += loss.detach().cpu()
            tokens += len(pair.tokens)
        self._add_up(loss_sum, *(p.grad for p in self._parameters))
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._recipe.clip_norm)
        if not (math.isfinite(loss_sum) and math.isfinite(norm)):
            raise FloatingPointError(f"update {update + 1}: loss {float(loss_sum)}, gradient norm {float(norm)}")
        rate = learning_rate(update, self._job.updates, self._recipe)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        return {
            "update": update + 1,
            "loss": float(loss_sum),
            "learning_rate": rate,
            "gradient_norm": float(norm),
            "tokens": tokens,
            "seconds": time.perf_counter() - begin,
        }

    def _predict(self, pair: TrainingPair) -> torch.Tensor:
        """The network's output for a pair, behind which rows are added that no other row sees.

        Narrow products on CPU are compiled anew for each number of rows, and lengths hardly repeat.
        """
        rows = len(pair.tokens)
        added = -rows % _ROW_MULTIPLE
        stale, tokens = F.pad(pair.stale, (0, 0) * 4 + (0, added)), F.pad(pair.tokens, (0, added))
        with torch.autocast(self._target.device.type, torch.bfloat16, self._narrow):
            return self.network.forward_packed(stale, tokens, [pair.lengths, [added]])[:rows]

    @property
    def _narrow(self) -> bool:
        return self._recipe.matmul_precision == "medium"

    @contextmanager
    def _network_precision(self) -> Iterator[None]:
        """What autocast leaves in float32 is attention, of chunks of any length: not to be compiled for each."""
        outside = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest" if self._narrow else outside)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(outside)

    def _batch(self, update: int) -> Iterator[TrainingPair]:
        """This worker's pairs of an update."""
        size, groups = self._recipe.groups_per_update, self._job.training
        mine = list(visits(update * size, (update + 1) * size, len(groups), self._recipe))[self._rank :: self._world]
        return (self._pair(groups[index], variant) for index, variant in mine)

    def _held_out(self) -> Iterator[TrainingPair]:
        return (self._pair(group, 0) for group in self._job.validation)

    def _pair(self, group: TokenGroup, variant: int) -> TrainingPair:
        chunks = arrange(group, self._job.header, self._recipe.seed, variant, self._recipe.max_tokens)
        return self._pairs.pair(chunks)

    def _validate(self, update: int) -> Validation:
        found = validate(self.network, self._held_out(), self.statistics)
        self._curve.add({"update": update, "validation": found.as_dict()})
        return found

    def _publish(self, update: int, found: Validation) -> None:
        """Write the checkpoint that people load."""
        save_checkpoint(
            self.network,
            self._job.output,
            self._target,
            target_model_id=Path(self._model).name if Path(self._model).is_dir() else self._model,
            capacity=self._job.size,
            training=self._account(update, found),
        )

    def _account(self, update: int, found: Validation) -> dict[str, Any]:
        """The `training` section of a checkpoint's config, with the published keys where there are such."""
        recipe = self._recipe
        return {
            "seed": recipe.seed,
            "effective_document_batch": recipe.groups_per_update,
            "groups": len(self._job.training),
            "arrangements_per_group": recipe.variants,
            "header_chunk": recipe.header_chunk,
            "checkpoint_step": update,
            "learning_rate_horizon_updates": self._job.updates,
            "objective": recipe.objective,
            "optimizer": {
                "name": {"adamw": "AdamW", "muon": "Muon on matrices, AdamW on the rest"}[recipe.optimizer],
                "betas": list(recipe.betas),
                "epsilon": recipe.epsilon,
                "weight_decay": recipe.weight_decay,
                "gradient_clip_norm": recipe.clip_norm,
            },
            "learning_rate": {
                "peak": recipe.learning_rate,
                "minimum": recipe.min_learning_rate,
                "decay": "cosine",
                "warmup_fraction": recipe.warmup_fraction,
            },
            **lineage(recipe, self._job.parent),
            "residual_floor": recipe.residual_floor,
            "matmul_precision": recipe.matmul_precision,
            "validation": {
                "normalized_mse": found.repaired.nmse,
                "stale_normalized_mse": found.stale.nmse,
                **found.as_dict(),
            },
        }


def learning_rate(update: int, horizon: int, recipe: TrainingSettings) -> float:
    """Rate of an update (0-based): linear warm-up, then a cosine that ends at the minimum with the horizon."""
    warmup = round(recipe.warmup_fraction * horizon)
    if update < warmup:
        return recipe.learning_rate * (update + 1) / warmup
    done = (update - warmup) / max(1, horizon - 1 - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return recipe.min_learning_rate + (recipe.learning_rate - recipe.min_learning_rate) * cosine


def visits(start: int, stop: int, groups: int, recipe: TrainingSettings) -> Iterator[tuple[int, int]]:
    """Group index and variant of visits `start` to `stop`, counted from the beginning of the run."""
    epoch, order = -1, []
    for visit in range(start, stop):
        if visit // groups != epoch:
            epoch = visit // groups
            order = epoch_order(groups, recipe.seed, epoch)
        yield order[visit % groups], epoch % recipe.variants
