"""Ranks: one process or many, a CPU or GPUs, DDP or FSDP2, behind one small interface."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from drafter import torchrun_env
from drafter.errors import ResumableError, StageError
from drafter.stage import as_stage_error

Kind = Literal["ddp", "fsdp2"]

STATE_BYTES = 16  # a parameter: weight, gradient and two moments in fp32
STATE_SHARE = 0.5  # of a GPU's memory that they may take; the rest is for activations


class MainFailed(StageError):
    """Raised on the other ranks when rank 0's work raised: they end as it does."""

    def __init__(self, exit_code: int):
        super().__init__("rank 0 failed")
        self.exit_code = exit_code


class Ranks:
    """What torchrun says of this process: rank, number of ranks, device."""

    def __init__(self):
        self.rank = torchrun_env.get("RANK", 0)
        self.world = torchrun_env.get("WORLD_SIZE", 1)
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torchrun_env.get("LOCAL_RANK", 0))
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def copies_directly(self) -> bool:
        """Whether NCCL can copy from every other rank's GPU without the host's memory between them."""
        if self.world == 1 or self.device.type != "cuda":
            return True
        if os.environ.get("NCCL_P2P_DISABLE", "0") != "0" or torchrun_env.get("LOCAL_WORLD_SIZE", 0) != self.world:
            return False
        others = set(range(self.world)) - {self.device.index}
        return all(torch.cuda.can_device_access_peer(self.device, other) for other in others)

    def holds(self, state: int) -> bool:
        """Whether `state` bytes leave this rank's GPU enough memory for the rest."""
        if self.world == 1 or self.device.type != "cuda":
            return True
        return state <= STATE_SHARE * torch.cuda.get_device_properties(self.device).total_memory

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor` summed over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def all(self, flag: bool) -> bool:
        """Whether `flag` is true on every rank."""
        return not int(self.sum(torch.tensor(int(not flag), device=self.device)))

    def decide(self, work: Callable[[], Any]) -> Any:
        """What `work` returns on rank 0, on every rank: file systems, clocks and GPUs look different from each.

        What it raises there stops every rank.
        """
        found: list[Any] = []
        self.on_main(lambda: found.append(work()))
        if self.world > 1:
            found = found or [None]
            dist.broadcast_object_list(found, src=0, device=self.device)
        return found[0]

    def barrier(self) -> None:
        if self.world > 1:
            self.sum(torch.zeros((), device=self.device))

    def on_main(self, work: Callable[[], Any], together: Iterable = ()) -> None:
        """Run `work` on rank 0 while the others wait; what it raises stops every rank.

        `together`: what `work` goes through and all ranks must, to its end, also where `work` fails.
        """
        failed: Exception | None = None
        if self.main:
            try:
                work()
            except Exception as error:
                failed = error
        for _ in together:
            pass
        known = failed and (as_stage_error(failed) or failed)
        code = 0 if failed is None else getattr(known, "exit_code", 1)
        if (said := int(self.sum(torch.tensor(code, device=self.device)))) and failed is None:
            raise MainFailed(said)
        if failed is not None:
            raise failed


@contextlib.contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Join the other ranks for as long as the block lasts. Raises ResumableError when one of them is gone."""
    own = Ranks()
    if own.device.type == "cuda":
        make_deterministic()
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


def make_deterministic() -> None:
    """Have kernels add in an order that timing does not change: resuming changes nothing, bit for bit."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads what it has not written


def parallel_kind(asked: Kind | Literal["auto"], model: torch.nn.Module, own: Ranks) -> Kind:
    """What `auto` means here, the same on every rank.

    DDP, the simpler one, where every rank can hold the whole state and its GPU copies to the others directly: both
    are as fast there. FSDP2 otherwise: without direct copies it is 1.1 times as fast (docs/measurements.md).
    """
    if asked != "auto":
        return asked
    numbers = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return "ddp" if own.all(own.holds(STATE_BYTES * numbers) and own.copies_directly) else "fsdp2"


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


def gather(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered; every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """This rank's own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def scatter(tensor: Tensor | None, parameter: Tensor) -> Tensor:
    """Rank 0's whole `tensor`, placed and sharded as `parameter` is; every rank must ask, the others with None."""
    if tensor is None:
        tensor = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    tensor = tensor.to(parameter.device)
    if isinstance(parameter, DTensor):  # scatters what rank 0 has
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
    if dist.is_initialized():
        dist.broadcast(tensor, src=0)
    return tensor


def place_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, placed and sharded as `parameter` is."""
    tensor = tensor.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
    return tensor
