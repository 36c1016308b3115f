"""The training loop: steps, validations and checkpoints. One process or many, the same code and the same order."""

import contextlib
import math
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from drafter import files, signals
from drafter.config import Config
from drafter.errors import ContractError, Interrupted, ResumableError
from drafter.progress import Progress
from drafter.stage import Stage, say
from drafter.target import eagle3_folder
from drafter.target.head import Verifier, read_last_layer, read_verifier
from drafter.train import (
    checkpoint,
    distributed,
    draft_model,
    examples,
    layer_convention,
    new_drafter,
    warm_start_check,
)
from drafter.train.dataset import Dataset, make_reader
from drafter.train.metrics import Metrics, region_figures, step_figures
from drafter.train.optimizer import Optimizer, learning_rate
from drafter.train.resume import Position, resume_identity

# Facts measured once, before step 1, and kept in checkpoints.
BEFORE = ("layer_losses", "first_look_length", "served_length", "expected_acceptance_before")
FEW_VALIDATION_ROWS = 20


class Training:
    """One training run: model, optimizer, data and position."""

    def __init__(self, stage: Stage, dataset: Dataset, ranks: distributed.Ranks):
        self.stage, self.dataset, self.ranks = stage, dataset, ranks
        self.config: Config = stage.config
        self.position = Position()
        self.metrics: Metrics | None = None
        self.signal = 0

    def run(self) -> None:
        self._prepare()
        self._say_facts()
        if self.ranks.main:
            self.metrics = Metrics(self.stage.folder, self.position.step, self.position.validated)
        self._listen()
        started, before = time.perf_counter(), self.position.tokens
        steps = self.dataset.schedule.steps
        progress = Progress(len(steps), "steps", self.position.step) if self.ranks.main else None
        remaining = steps[self.position.step :]
        shares = (item for step in remaining for item in step.share(self.ranks.rank, self.ranks.world))
        self.stream = self.loader.packs(shares)
        try:
            self._catch_up()
            for step in remaining:
                if self._gave_up():
                    break
                figures = self._step(step)
                if progress:
                    progress.advance(
                        1,
                        loss=_shown(figures["loss"]),
                        expected_acceptance=f"{figures['expected_acceptance']:.2f}",
                        tokens_per_s=round(figures["tokens_per_s"]),
                    )
                stop = figures["stop"] or (self._validate() if self._validates(step.number) else 0)
                if stop or self._saves(step.number):
                    self._save()
                    stop = stop or self._stop()
                if stop:
                    raise Interrupted(stop)
        finally:
            if progress:
                progress.close()
            if self.metrics:
                self.metrics.close()
        self._finish(time.perf_counter() - started, self.position.tokens - before)

    # Before the first step

    def _prepare(self) -> None:
        config, train = self.config, self.config.train
        verifier = read_verifier(config.target.model)
        done, state = self.ranks.decide(self._last_step)
        if done:
            weights, self.settings = checkpoint.read_draft(done)
            self._resume(state)
        else:
            weights, self.settings = first_draft(config, verifier, self.dataset)
        self.keeps_embedding = eagle3_folder.EMBEDDING in weights
        self.compute = torch.bfloat16 if train.precision == "bf16" else torch.float32
        try:
            self.model = draft_model.build_drafter(weights, self.settings, verifier, config.target)
        except ContractError as error:
            raise ContractError(f"{done or train.warm_start}: {error}") from None
        self.model.prepare(verifier, self.compute, train.ttt_steps)
        self.model.to(self.ranks.device)
        counts = examples.token_counts(self.dataset.train, self.dataset.folder, config.target.architecture.vocab_size)
        kept = self.model.t2d.cpu() if self.model.t2d is not None else torch.ones_like(counts, dtype=torch.bool)
        judged = not config.run.rehearsal  # what a part of the target writes says nothing about a drafter
        self.outside = warm_start_check.share_outside_vocabulary(kept, counts, judged)
        if train.warm_start and not done and judged:
            self.ranks.on_main(lambda: self._check_warm_start(verifier))
        draft_model.freeze_all_but(self.model, train.trainable)
        reader = make_reader(config, self.dataset.folder, pin=self.ranks.device.type == "cuda")
        self.loader = examples.Loader(reader, self.ranks.device, train.loader_workers)
        self.kind = distributed.parallel_kind(self._kind_before(state), self.model, self.ranks)
        self.wrapped = distributed.wrap(self.model, self.kind, self.ranks, self.compute)
        parameters = draft_model.freeze_all_but(self.model, train.trainable)  # sharded by now
        pulled_to = eagle3_folder.read_drafter(train.warm_start)[0] if train.l2_sp and train.warm_start else None
        self.optimizer = Optimizer(parameters, train, pulled_to)
        if done:
            self._load_moments(done)
            say("resuming from %s", done.name)

    def _last_step(self) -> tuple[Path | None, dict[str, Any]]:
        done = checkpoint.complete_steps(self.stage.folder)
        return (done[-1], checkpoint.read_state(done[-1], *asdict(self.position))) if done else (None, {})

    def _load_moments(self, step: Path) -> None:
        moments: dict[str, torch.Tensor] = {}  # on rank 0 alone: at Kimi's size they are 10 GB

        def read() -> None:
            moments.update(checkpoint.read_moments(step))
            self.optimizer.check(moments)

        self.ranks.on_main(read)
        self.optimizer.load(moments, self.position.step)

    def _check_warm_start(self, verifier: Verifier) -> None:
        rows = self.dataset.train + self.dataset.validation
        self.stage.facts["layer_losses"] = layer_convention.losses_by_layer_ids(self.model, self.config, rows)
        self.stage.facts |= warm_start_check.check_warm_start(self.model, verifier, self.config, self.dataset)

    def _resume(self, state: dict[str, Any]) -> None:
        self.position = Position(**{key: state[key] for key in asdict(self.position)})
        self.stage.facts |= {key: state[key] for key in BEFORE if key in state}

    def _kind_before(self, state: dict[str, Any]) -> distributed.Kind | Literal["auto"]:
        """`auto` keeps its choice for the same number of ranks, so that a resumed run adds in the same order."""
        asked = self.config.train.parallel
        same = state.get("ranks") == self.ranks.world
        return state.get("parallel", asked) if asked == "auto" and same else asked

    def _say_facts(self) -> None:
        rows = self.dataset.train
        tokens, anchors = sum(row.slots for row in rows), sum(row.asked[0] for row in rows)
        numbers = sum(distributed.local_part(p).numel() for p in self.optimizer.parameters.values())
        frozen = sum(p.numel() * p.element_size() for p in self.model.parameters() if not p.requires_grad)
        self.stage.facts |= {
            "rows_train": len(rows),
            "rows_validation": len(self.dataset.validation),
            "tokens": tokens,
            "supervised_share": round(anchors / tokens, 4),
            "out_of_vocabulary_share": round(self.outside, 4),
            "trainable_parameters": sum(p.numel() for p in self.optimizer.parameters.values()),
            "state_gib": round((16 * numbers + frozen) / files.GIB, 2),
            "ranks": self.ranks.world,
            "parallel": self.kind,
        }
        if self.ranks.main:
            facts = self.stage.facts
            say(
                "%d rows train, %d validate; %d tokens, %.1f%% learned; %.2f%% missing in the drafter's vocabulary",
                len(rows), facts["rows_validation"], tokens, 100 * anchors / tokens, 100 * self.outside,
            )  # fmt: skip
            if facts["rows_validation"] < FEW_VALIDATION_ROWS:
                say(
                    "with fewer than %d validation rows the choice of the best step is partly chance; more rows or a "
                    "larger train.validation_share help", FEW_VALIDATION_ROWS,
                )  # fmt: skip
            say(
                "%.1fM parameters train on %s; weights, gradients and optimizer take %.1f GB of memory each",
                facts["trainable_parameters"] / 1e6,
                "one process" if self.ranks.world == 1 else f"{self.ranks.world} processes",
                facts["state_gib"] * files.GIB / 1e9,
            )  # fmt: skip

    def _listen(self) -> None:
        """From now on a signal only takes effect at the end of the step."""

        def note(signum: int, _frame) -> None:
            self.signal = self.signal or signum

        for signum in signals.wanted():
            signal.signal(signum, note)

    # The loop's parts

    def _step(self, step: examples.Step) -> dict[str, Any]:
        """One optimizer step over this rank's packs. Raises ContractError, before the update, if it is not finite."""
        train, started, waited = self.config.train, time.perf_counter(), self.loader.waited
        share = step.share(self.ranks.rank, self.ranks.world)
        # Gradients are averaged over ranks, the loss over the guesses of all ranks.
        scale = torch.tensor(
            [train.ttt_decay**k * self.ranks.world / max(1, n) for k, n in enumerate(step.asked)],
            device=self.ranks.device,
        )
        sums = torch.zeros(2, train.ttt_steps, len(draft_model.STATS), device=self.ranks.device)
        for index in range(len(share)):
            with distributed.gradient_sync(self.wrapped, last=index + 1 == len(share)):
                loss, stats = self.wrapped(next(self.stream), scale)
                loss.backward()
            sums += stats
        norm = self.optimizer.clip()
        # One transfer for each step brings all numbers to the host, before the update.
        flags = self._signal_flags()
        sums = self.ranks.sum(torch.cat([sums.flatten(), flags]))
        *flat, norm = torch.cat([sums, norm.reshape(1).to(sums.dtype)]).tolist()
        if not math.isfinite(norm):
            names = [row.entry.row_id for rows, _ in share for row in rows]
            raise ContractError(
                f"step {step.number}: loss or gradient is not finite: the states are damaged, or train.lr is too "
                f"high; this rank's rows: {names}"
            )
        lr = learning_rate(step.number, len(self.dataset.schedule.steps), train)
        self.optimizer.step(lr)

        seconds = time.perf_counter() - started
        self.position.step = step.number
        self.position.tokens += step.tokens
        self.position.seconds_per_step = seconds
        counts, received = flat[: -len(flags)], flat[-len(flags) :]
        figures = step_figures(torch.tensor(counts).view(2, train.ttt_steps, len(draft_model.STATS)).sum(0))
        figures = {
            "epoch": step.epoch,
            "lr": lr,
            "loss_total": sum(train.ttt_decay**k * loss for k, loss in enumerate(figures["loss"])),
            **figures,
            "gradient_norm": norm,
            "tokens": self.position.tokens,
            "tokens_per_s": round(step.tokens / seconds, 1),
            "data_share": round((self.loader.waited - waited) / seconds, 4),
        }
        if self.ranks.device.type == "cuda":
            figures["memory_gib"] = round(torch.cuda.max_memory_allocated(self.ranks.device) / files.GIB, 2)
        if self.metrics:
            self.metrics.write("train", step.number, figures)
        return figures | {"stop": self._received(received)}

    def _signal_flags(self) -> torch.Tensor:
        """The signal that this rank received, one-hot: summed over ranks, so that all stop at the same step."""
        flags = [float(self.signal == signum) for signum in signals.SIGNALS]
        return torch.tensor(flags, device=self.ranks.device)

    def _stop(self) -> int:
        return self._received(self.ranks.sum(self._signal_flags()).tolist())

    @staticmethod
    def _received(flags: list[float]) -> int:
        """The signal that any rank received, or 0."""
        return next((signum for signum, ranks in zip(signals.SIGNALS, flags, strict=True) if ranks), 0)

    def _saves(self, step: int) -> bool:
        return step > 0 and (step % self.config.train.save_every == 0 or step == len(self.dataset.schedule.steps))

    def _validates(self, step: int) -> bool:
        """Whether a validation is due: before every save, except saves by a signal."""
        return self._saves(step) or step % self.config.train.validate_every == 0

    def _catch_up(self) -> None:
        """Run the validation before step 1, or the one that a signal cut off."""
        position = self.position
        if position.validated == position.step or not self._validates(position.step):
            return
        if stop := self._validate():
            raise Interrupted(stop)
        if position.step:
            self.ranks.on_main(self._note_validated)

    def _metrics_of_main(self) -> Metrics:
        assert self.metrics is not None
        return self.metrics

    def _note_validated(self) -> None:
        self._metrics_of_main().sync()  # first, since a step that is marked as validated is not validated again
        checkpoint.save_state(checkpoint.step_path(self.stage.folder, self.position.step), self._state())

    def _validate(self) -> int:
        """Measure on the held-out rows. Returns 0, or the signal that interrupted it."""
        started = time.perf_counter()
        packs = examples.pack_rows(self.dataset.validation, self.config.target.max_seq_len, seed=None)
        share = examples.Step(0, 0, packs).share(self.ranks.rank, self.ranks.world)
        sums = torch.zeros(2, self.config.train.ttt_steps, len(draft_model.STATS), device=self.ranks.device)
        scale = torch.ones(self.config.train.ttt_steps, device=self.ranks.device)
        with torch.no_grad(), contextlib.closing(self.loader.packs(share)) as read:
            for pack in read:
                sums += self.wrapped(pack, scale)[1]
                if stop := self._stop():
                    return stop
        sums = self.ranks.sum(sums).cpu()
        if not sums.isfinite().all():
            raise ContractError(
                f"step {self.position.step}: the loss on held-out rows is not finite: the states are damaged, or "
                "train.lr is too high"
            )
        figures = region_figures(sums)
        position, acceptance = self.position, figures["expected_acceptance"]
        position.validated = position.step
        position.stale = 0 if acceptance > position.best else position.stale + 1
        position.best = max(position.best, acceptance)
        position.expected_acceptance = acceptance
        if not self.ranks.main:
            return 0
        self._metrics_of_main().write(
            "validation", position.step, figures | {"seconds": round(time.perf_counter() - started, 3)}
        )
        say(
            "step %d: validation loss %s (one for each draft token), expected acceptance length %.2f",
            position.step, _shown(figures["loss"]), acceptance,
        )  # fmt: skip
        if position.step == 0:
            self.stage.facts["expected_acceptance_before"] = acceptance
        return 0

    def _gave_up(self) -> bool:
        """Whether validation has not improved for too long; checked before each step, also after resuming."""
        patience, step = self.config.train.patience, self.position.step
        if not patience or self.position.stale < patience:
            return False
        say("step %d: no improvement in %d validations, stopping early", step, patience)
        if not self.ranks.decide(checkpoint.step_path(self.stage.folder, step).exists):
            self._save()
        return True

    def _save(self) -> None:
        """Gather on rank 0 and write there. Raises ResumableError when that fails; earlier steps stay."""
        weights, moments = draft_model.native_weights(self.model, self.keeps_embedding), self.optimizer.moments()
        wholes = map(distributed.gather, checkpoint.tensors_in_file_order(weights, moments))
        path = checkpoint.step_path(self.stage.folder, self.position.step)

        def write() -> None:
            self._metrics_of_main().sync()
            checkpoint.save_step(path, weights, self.settings, moments, self._state(), wholes)
            checkpoint.prune_steps(self.stage.folder, self.config.train.keep_checkpoints)

        try:
            self.ranks.on_main(write, wholes)
        except (OSError, distributed.MainFailed) as error:
            done = checkpoint.complete_steps(self.stage.folder)
            last = f"the last saved step is {done[-1].name}" if done else "no step is saved"
            raise ResumableError(f"step {self.position.step} could not be saved ({error}); {last}") from None

    def _state(self) -> dict[str, Any]:
        state = asdict(self.position) | resume_identity(self.config, self.dataset)
        state |= {"ranks": self.ranks.world, "parallel": self.kind}
        return state | {key: self.stage.facts[key] for key in BEFORE if key in self.stage.facts}

    def _finish(self, seconds: float, tokens: int) -> None:
        """`tokens` and `seconds` of this call, validations and checkpoints included."""
        if not self.ranks.main:
            return
        best = checkpoint.best_step(self.stage.folder)
        self.stage.facts |= {
            "plan": self.dataset.schedule.fingerprint,
            "last_step": self.position.step,
            "best": best.name,
            "expected_acceptance": checkpoint.read_state(best)["expected_acceptance"],
            "tokens_seen": self.position.tokens,
            "tokens_per_second": round(tokens / seconds, 1),
        }
        say("best step: %s, expected acceptance length %.2f", best.name, self.stage.facts["expected_acceptance"])


def first_draft(config: Config, verifier: Verifier, dataset: Dataset) -> tuple[eagle3_folder.Tensors, dict[str, Any]]:
    """Weights and native config before the first step: the warm start's, or new ones."""
    train, vocab_size = config.train, config.target.architecture.vocab_size
    if train.warm_start is None:
        settings = new_drafter.first_config(config.target, train.draft_vocab_size, train.draft_intermediate_size)
        vocabulary = None
        if settings["draft_vocab_size"] != vocab_size:
            counts = examples.token_counts(dataset.train, dataset.folder, vocab_size)
            vocabulary = new_drafter.draft_vocabulary(counts, settings["draft_vocab_size"])
        layer = read_last_layer(config.target.model)
        return new_drafter.first_weights(settings, verifier, vocabulary, config.run.seed, layer), settings
    return eagle3_folder.check_folder(train.warm_start, config.target), eagle3_folder.read_config(train.warm_start)


def _shown(losses: list[float]) -> str:
    """The losses of the draft tokens, for the log."""
    return "/".join(f"{loss:.2f}" for loss in losses)
