"""Ranks: one process or many, a CPU or GPUs, DDP or FSDP2, behind one small interface."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

Kind = Literal["ddp", "fsdp2"]


class MainFailed(Exception):
    """Raised on the other ranks when rank 0's work raised."""


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

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor` summed over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        if self.world > 1:
            self.sum(torch.zeros((), device=self.device))

    def on_main(self, work: Callable[[], Any]) -> None:
        """Run `work` on rank 0 while the others wait; what it raises stops every rank."""
        failed: BaseException | None = None
        if self.main:
            try:
                work()
            except Exception as error:
                failed = error
        if self.sum(torch.tensor(float(failed is not None), device=self.device)) and failed is None:
            raise MainFailed("rank 0 failed")
        if failed is not None:
            raise failed


@contextlib.contextmanager
def ranks() -> Iterator[Ranks]:
    """Join the other ranks for as long as the block lasts."""
    own = Ranks()
    if own.world > 1:
        dist.init_process_group("nccl" if own.device.type == "cuda" else "gloo")
    try:
        yield own
    finally:
        if own.world > 1:
            dist.destroy_process_group()


STATE_BYTES = 16  # a parameter: weight, gradient and two moments in fp32
STATE_SHARE = 0.5  # of a GPU's memory that they may take; the rest is for activations


def choose(asked: Literal["auto", "ddp", "fsdp2"], model: torch.nn.Module, device: torch.device) -> Kind:
    """DDP where every rank can hold the whole state, which then needs no gathering; FSDP2 elsewhere."""
    if asked != "auto":
        return asked
    if device.type != "cuda":
        return "ddp"
    numbers = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    available = torch.cuda.get_device_properties(device).total_memory
    return "ddp" if STATE_BYTES * numbers < STATE_SHARE * available else "fsdp2"


def wrap(
    model: torch.nn.Module, kind: Kind, own: Ranks, compute: torch.dtype, reshard: bool = False
) -> torch.nn.Module:
    """`model`, on its device already, made to average gradients over ranks. Call the result; keep using `model`.

    One drafter layer is used in every step, so its weights stay gathered until the backward pass ends and FSDP2 takes
    the model as one unit. The target's frozen weights stay whole on every rank: gathering them each step costs more.
    """
    if own.world == 1:
        return model
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    if kind == "ddp":
        # Every rank has read the same frozen weights and vocabulary map; there is nothing to send.
        still = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        still += [name for name, _ in model.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, still)
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return fully_shard(model, mp_policy=policy, ignored_params=set(frozen), reshard_after_forward=reshard)


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
