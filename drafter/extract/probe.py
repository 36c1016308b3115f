"""The capture probe: checks that captured states are the *right* ones.

It compares the server's own `prompt_logprobs` with log_softmax(head(norm(final))), computed from a file's final layer
and the target's weights. Correct states differ by a few hundredths of a nat; the layer before, a second norm, a
missing norm, a position off by one or another row's states differ by 1 to 500. If the target is small enough to load,
the auxiliary layers are compared with transformers' `hidden_states[i]`.
"""

import asyncio
import functools
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter.config import Config
from drafter.errors import ContractError, ResumableError, RowError
from drafter.extract import states
from drafter.serve.client import Client
from drafter.stage import say
from drafter.target.head import Verifier, read_verifier

TOKENS = 256  # tokens of a row to compare: the server computes logits for each
MEAN_NAT, TOP1 = 0.1, 0.95
TIES = 2  # bf16 logits tie now and then, which must not fail a probe of a few dozen positions
RELATIVE = 0.15  # allowed share of an auxiliary layer's norm; two bf16 implementations differ by 0.01 to 0.03
GROWTH, PACKED_GROWTH = 2, 8  # of weights that are loaded as float32: from bf16, and from 4 bits
SMALL_BYTES = 2 << 30  # weights of a target that is loaded to compare its layers
LAYER_TOKENS = 32  # tokens of a row whose layers are computed again, on the CPU
CHUNK = 128  # positions whose logits are in memory at once
THREADS = 8  # more threads spin while they wait and take cores from the server (docs/measurements.md)


@dataclass(frozen=True, slots=True)
class Result:
    rows: int
    positions: int
    mean_nat: float
    max_nat: float
    top1: float
    layers: dict[str, dict] | None  # asked id -> nearest id and its relative distance; None: target too large to load

    @property
    def passed(self) -> bool:
        right = all(int(asked) == got["nearest"] and got["distance"] < RELATIVE for asked, got in self.aux.items())
        misses = round((1 - self.top1) * self.positions)
        return self.mean_nat < MEAN_NAT and misses <= max(TIES, (1 - TOP1) * self.positions) and right

    @property
    def aux(self) -> dict[str, dict]:
        return self.layers or {}

    def to_record(self) -> dict:
        return asdict(self) | {"passed": self.passed}

    def __str__(self) -> str:
        layers = ""
        for asked, got in self.aux.items():
            found = "as expected" if int(asked) == got["nearest"] else f"looks like layer {got['nearest']}"
            layers += f", layer {asked} {found} (relative difference {got['distance']:.3f})"
        return (
            f"the same next token at {self.top1:.1%} of {self.positions} positions of {self.rows} rows (at least "
            f"{TOP1:.1%}), mean divergence {self.mean_nat:.4f} (limit {MEAN_NAT}; largest {self.max_nat:.3f}){layers}"
        )


class Probe:
    """Compares files with the target's weights, which a background thread reads from the start."""

    def __init__(self, config: Config):
        self.config = config
        torch.set_num_threads(min(THREADS, torch.get_num_threads()))
        with_target = ThreadPoolExecutor(1, thread_name_prefix="target")
        self._verifier = with_target.submit(_verifier, config)
        # A rehearsal's target is small enough for this machine's memory, or its layers are not compared.
        most = psutil.virtual_memory().available // 2 if config.run.rehearsal else None
        self._reference = with_target.submit(
            load_reference, config.target.model, config.target.trust_remote_code, most
        )
        with_target.shutdown(wait=False)

    @property
    def verifier(self) -> Verifier:
        """The target's norm and head; waits until they are read."""
        return self._verifier.result()

    async def check(self, client: Client, rows: list[tuple[list[int], Path]]) -> Result:
        """Compare files with the server's own log-probabilities of their token ids.

        Raises ContractError, or ResumableError when the server does not answer.
        """
        asked = (self._ask(client, ids[:TOKENS]) for ids, _path in rows)
        replies = await asyncio.gather(*asked, return_exceptions=True)  # wait for all, also after an error
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return await asyncio.to_thread(self._compare, rows, replies)

    async def _ask(self, client: Client, ids: list[int]) -> list[tuple[float, int]]:
        """The server's log-probability and its likeliest token at each position but the first."""
        body = {"model": self.config.target.served_name, "prompt": ids, "max_tokens": 1, "temperature": 0}
        try:
            reply = await client.post("/v1/completions", body | {"prompt_logprobs": 1}, timeout=600)
            entries = reply["choices"][0]["prompt_logprobs"]
            return [(entries[t][str(ids[t])]["logprob"], _best(entries[t])) for t in range(1, len(ids))]
        except RowError as error:
            if error.reason == "failed":
                raise ResumableError(
                    f"the extract server did not answer the probe ({error.detail}); run the same command again"
                ) from None
            raise ContractError(f"the extract server refused the probe: {error}") from None
        except (LookupError, TypeError, ValueError, AttributeError, StopIteration):
            raise ContractError("the extract server's reply to the probe has no prompt_logprobs") from None

    def _compare(self, rows: list[tuple[list[int], Path]], replies: list) -> Result:
        verifier, reference = self.verifier, self._reference.result()
        differences, hits, distances = [], [], []
        for (ids, path), reply in zip(rows, replies, strict=True):
            ids = ids[:TOKENS]
            captured = states.read_states(path)
            served, best = map(torch.tensor, zip(*reply, strict=True))
            for start in range(0, len(ids) - 1, CHUNK):
                window = slice(start, min(start + CHUNK, len(ids) - 1))
                ours = verifier.log_probs(captured.final[window])
                actual = torch.tensor(ids[window.start + 1 : window.stop + 1])
                differences.append((ours.gather(1, actual[:, None])[:, 0] - served[window]).abs())
                hits.append(ours.argmax(dim=-1) == best[window])
            if reference is not None and (distance := reference.distances(ids, captured)) is not None:
                distances.append(distance)
        difference, hit = torch.cat(differences), torch.cat(hits)
        return Result(
            rows=len(rows),
            positions=len(difference),
            mean_nat=difference.mean().nan_to_num(float("inf")).item(),
            max_nat=difference.max().item(),
            top1=hit.float().mean().item(),
            layers=self._nearest(torch.stack(distances).mean(dim=0)) if distances else None,
        )

    def _nearest(self, distances: Tensor) -> dict[str, dict]:
        return {
            str(asked): {"nearest": int(row.argmin()), "distance": round(row.min().item(), 4)}
            for asked, row in zip(self.config.target.aux_layer_ids, distances, strict=True)
        }


def _verifier(config: Config) -> Verifier:
    """The target's head in the server's precision: bf16 logits tie where those of a float32 server do not."""
    verifier = read_verifier(config.target.model)
    wide = config.servers.extract.args.get("dtype") == "float32"
    return replace(verifier, head=verifier.head.float()) if wide else verifier


def _best(entry: dict) -> int:
    return next(int(token) for token, facts in entry.items() if facts["rank"] == 1)


def check_neighbours(path: Path, aux_layer_ids: tuple[int, ...]) -> None:
    """Check layer ids on a target that is too large to load: each layer must be most similar to the next one above.

    `path` holds the asked layers, those above them and the final one. Raises ContractError when they are mixed up.
    """
    read = states.read_states(path)
    layers = torch.cat([read.aux, read.final[:, None]], dim=1).float()
    place = {layer: slot for slot, layer in enumerate(read.layer_ids)}
    for asked in aux_layer_ids:
        own = layers[:, place[asked]]
        above = {layer: layers[:, slot] for layer, slot in place.items() if layer > asked}
        nearest = min(above, key=lambda layer: (above[layer] - own).norm(dim=-1).mean().item())
        if nearest != asked + 1:
            raise ContractError(
                f"the states of layer {asked} are most similar to layer {nearest}, not to {asked + 1}: the extract "
                "server captures other layers than target.layer_ids"
            )


class Reference:
    """The target loaded in transformers, which gives the inputs of its layers."""

    def __init__(self, model: torch.nn.Module):
        self.model = model.eval()
        self._failed = False

    @torch.no_grad()
    def distances(self, ids: list[int], captured: states.States) -> Tensor | None:
        """Relative distance of each captured auxiliary layer from each layer's input: [A, N].

        None if the model's own code does not return its layers.
        """
        ids = ids[:LAYER_TOKENS]
        try:
            output = self.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
            # The last of them has been through the final norm.
            layers = torch.stack([state[0].float() for state in output.hidden_states[:-1]])
        except Exception as error:  # a model's own code may raise anything
            if not self._failed:
                say("probe: the target's code returns no layers (%r); auxiliary layers are not compared", error)
            self._failed = True
            return None
        aux = captured.aux[: len(ids)].transpose(0, 1).float()
        return torch.stack([(layers - one).norm(dim=(1, 2)) / layers.norm(dim=(1, 2)) for one in aux])


@functools.lru_cache(maxsize=1)
def load_reference(model: Path, trust_remote_code: bool = False, memory: int | None = None) -> Reference | None:
    """None when the target is too large to load beside the server, or transformers cannot load all its weights.

    Too large are weights of more than SMALL_BYTES, or those that would take more than `memory` bytes as float32.
    """
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    if memory is None:
        memory, growth = SMALL_BYTES, 1
    else:
        growth = PACKED_GROWTH if "pack-quantized" in (model / "config.json").read_text() else GROWTH
    if weights * growth > memory:
        return None
    try:
        return _load(model, trust_remote_code)
    except Exception as error:  # transformers and a model's own code may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        say("probe: transformers cannot load %s (%s); auxiliary layers are not compared", model, reason)
        return None


def _load(model: Path, trust_remote_code: bool) -> Reference | None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    outer = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    inner = outer.get_text_config()
    with tempfile.TemporaryDirectory() as folder:
        source = model if inner is outer else _unnested(model, inner, Path(folder))
        loaded, found = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, output_loading_info=True, trust_remote_code=trust_remote_code
        )
    return None if found["missing_keys"] else Reference(loaded)


def _unnested(model: Path, config, folder: Path) -> Path:
    """Write the text model of a multimodal folder to `folder`."""
    # transformers merges experts by the model type, which a nested config may not name.
    facts = config.to_dict() | {"model_type": type(config).model_type}
    (folder / "config.json").write_text(json.dumps(facts))
    (folder / "generation_config.json").write_text("{}")
    for path in model.glob("*.safetensors"):
        prefix = "language_model."
        tensors = load_file(path)
        own = {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
        save_file(own, folder / path.name, metadata={"format": "pt"})
    if (index := model / "model.safetensors.index.json").exists():
        (folder / index.name).write_text(index.read_text().replace('"language_model.', '"'))
    return folder
