"""Ranks: one process or many, a CPU or GPUs, DDP or FSDP2, behind one small interface."""

import contextlib
import copy
import gc
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from drafter.errors import ResumableError, StageError
from drafter.stage import of_the_machine

log = logging.getLogger("drafter")

Kind = Literal["ddp", "fsdp2"]
Step = Callable[[torch.nn.Module], None]  # a forward and a backward pass

STATE_BYTES = 16  # a parameter: weight, gradient and two moments in fp32
STATE_SHARE = 0.5  # of a GPU's memory that they may take; the rest is for activations
TRIAL_STEPS = 3


class MainFailed(StageError):
    """Raised on the other ranks when rank 0's work raised: they end as it does."""

    def __init__(self, exit_code: int):
        super().__init__("rank 0 failed")
        self.exit_code = exit_code


class Ranks:
    """What torchrun says of this process: rank, number of ranks, device."""

    def __init__(self):
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def copies_directly(self) -> bool:
        """Whether NCCL can copy from every other rank's GPU without the host's memory between them."""
        if (
            os.environ.get("NCCL_P2P_DISABLE", "0") != "0"
            or int(os.environ.get("LOCAL_WORLD_SIZE", "0")) != self.world
        ):
            return False
        others = set(range(self.world)) - {self.device.index}
        return all(torch.cuda.can_device_access_peer(self.device, other) for other in others)

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor` summed over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        if self.world > 1:
            self.sum(torch.zeros((), device=self.device))

    def on_main(self, work: Callable[[], Any], together: Iterable = ()) -> None:
        """Run `work` on rank 0 while the others wait; what it raises stops every rank.

        `together`: what `work` goes through and all ranks must, to its end, also where `work` fails.
        """
        failed: BaseException | None = None
        if self.main:
            try:
                work()
            except Exception as error:
                failed = error
        for _ in together:
            pass
        known = failed and (of_the_machine(failed) or failed)
        code = 0 if failed is None else getattr(known, "exit_code", 1)
        if (said := int(self.sum(torch.tensor(code, device=self.device)))) and failed is None:
            raise MainFailed(said)
        if failed is not None:
            raise failed


@contextlib.contextmanager
def ranks() -> Iterator[Ranks]:
    """Join the other ranks for as long as the block lasts. Raises ResumableError when one of them is gone."""
    own = Ranks()
    if own.device.type == "cuda":
        add_in_one_order()
    try:
        if own.world > 1:
            dist.init_process_group("nccl" if own.device.type == "cuda" else "gloo")
        yield own
    except RuntimeError as error:
        if own.world > 1 and (isinstance(error, dist.DistError) or "/gloo/" in str(error)):
            raise ResumableError(f"another rank is gone: {' '.join(str(error).split())[:200]}") from None
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def add_in_one_order() -> None:
    """Have kernels add in an order that timing does not change: resuming changes nothing, bit for bit."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads what it has not written


def choose(
    asked: Kind | Literal["auto"], model: torch.nn.Module, own: Ranks, compute: torch.dtype, step: Step
) -> Kind:
    """What `auto` means here.

    FSDP2 where a rank cannot hold the whole state. Where it can and GPUs copy to each other directly, both are as
    fast (docs/measurements.md) and DDP is the simpler one. Otherwise the box decides, by three steps of each kind.
    """
    if asked != "auto":
        return asked
    if own.world == 1 or own.device.type != "cuda":
        return "ddp"
    numbers = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if STATE_BYTES * numbers > STATE_SHARE * torch.cuda.get_device_properties(own.device).total_memory:
        return "fsdp2"
    return "ddp" if own.copies_directly else quickest(model, own, compute, step)


def quickest(model: torch.nn.Module, own: Ranks, compute: torch.dtype, step: Step) -> Kind:
    """The kind whose steps take the least time, the same on every rank. `model` stays as it is."""
    seconds: dict[Kind, float] = {}
    for kind in get_args(Kind):
        frozen = {id(p): p for p in model.parameters() if not p.requires_grad}  # shared with the copy
        trial = wrap(copy.deepcopy(model, frozen), kind, own, compute)
        optimizer = torch.optim.AdamW([p for p in trial.parameters() if p.requires_grad], lr=0.0, fused=True)
        times = []
        for _ in range(1 + TRIAL_STEPS):  # the first one compiles
            started = time.perf_counter()
            step(trial)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            own.barrier()
            if own.device.type == "cuda":
                torch.cuda.synchronize(own.device)
            times.append(time.perf_counter() - started)
        seconds[kind] = float(own.sum(torch.tensor(min(times[1:]), device=own.device))) / own.world
        del trial, optimizer
        gc.collect()
    if own.main:
        log.info("a step takes %s", ", ".join(f"{s:.3f} s with {kind}" for kind, s in seconds.items()))
    return min(seconds, key=seconds.get)


def wrap(
    model: torch.nn.Module, kind: Kind, own: Ranks, compute: torch.dtype, reshard: bool = False
) -> torch.nn.Module:
    """`model`, on its device already, made to average gradients over ranks.

    Call the result, with gradients or without; `model` keeps its names and has the parameters to update. One drafter
    layer is used in every step, so its weights stay gathered until the backward pass ends and FSDP2 takes the
    matrices as one unit, gathered as `compute`, which the forward pass casts them to. Vectors, the norms' weights,
    are read in fp32: rounded to bf16 they would stand still until updates add up to 0.4%. They are a second unit, so
    that every kind computes the same numbers. The target's frozen weights stay whole on every rank: gathering them
    each step costs more.
    """
    if own.world == 1:
        return model
    if kind == "ddp":
        # Every rank has read the same frozen weights and vocabulary map; there is nothing to send.
        still = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        still += [name for name, _ in model.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, still)
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    outer, mesh = _Outer(model), init_device_mesh(own.device.type, (own.world,))
    for module, dtype, vectors in ((outer, torch.float32, True), (model, compute, False)):
        others = {p for p in model.parameters() if not p.requires_grad or (p.ndim == 1) != vectors}
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=others, reshard_after_forward=reshard)
    return outer


class _Outer(torch.nn.Module):
    """Gives FSDP2 a second unit around `model`."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Any:
        return self.model(*inputs)


@contextlib.contextmanager
def gradient_sync(wrapped: torch.nn.Module, last: bool) -> Iterator[None]:
    """Leave gradients local until the `last` backward pass of an optimizer step."""
    if isinstance(wrapped, DistributedDataParallel):
        with contextlib.nullcontext() if last else wrapped.no_sync():
            yield
        return
    if hasattr(wrapped, "set_requires_gradient_sync"):
        wrapped.set_requires_gradient_sync(last)
    yield


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered; every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, placed and sharded as `parameter` is."""
    tensor = tensor.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
    return tensor
