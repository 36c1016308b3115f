"""The ranks of a training run: one process or many, CPU or GPUs, DDP or FSDP2, behind one small interface."""

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

STATE_BYTES = 16  # for each parameter: weight, gradient and two moments in fp32
STATE_SHARE = 0.5  # share of a GPU's memory for them; the rest is for activations


class MainFailed(StageError):
    """Raised on the other ranks when rank 0's work raised; carries its exit code."""

    def __init__(self, exit_code: int):
        super().__init__("rank 0 failed")
        self.exit_code = exit_code


class Ranks:
    """This process's rank, the number of ranks and its device, from torchrun's environment."""

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
        """Whether NCCL can copy between this GPU and every other rank's without going through host memory."""
        if self.world == 1 or self.device.type != "cuda":
            return True
        if os.environ.get("NCCL_P2P_DISABLE", "0") != "0" or torchrun_env.get("LOCAL_WORLD_SIZE", 0) != self.world:
            return False
        others = set(range(self.world)) - {self.device.index}
        return all(torch.cuda.can_device_access_peer(self.device, other) for other in others)

    def holds(self, state: int) -> bool:
        """Whether `state` bytes leave enough of this rank's GPU memory for activations."""
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
        """Run `work` on rank 0 and return its result on every rank: file systems and clocks differ between hosts.

        An exception stops every rank.
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
        """Run `work` on rank 0 while the others wait; an exception stops every rank.

        `together`: an iterator of collectives that `work` consumes. Every rank drains it, even if `work` raises.
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
        if (main_code := int(self.sum(torch.tensor(code, device=self.device)))) and failed is None:
            raise MainFailed(main_code)
        if failed is not None:
            raise failed


@contextlib.contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Join the other ranks for the duration of the block. Raises ResumableError when one of them has died."""
    own = Ranks()
    if own.device.type == "cuda":
        make_deterministic()
    try:
        if own.world > 1:
            dist.init_process_group("nccl" if own.device.type == "cuda" else "gloo")
        yield own
    except RuntimeError as error:
        if own.world > 1 and (isinstance(error, dist.DistError) or "/gloo/" in str(error)):
            raise ResumableError(
                f"another rank has died ({' '.join(str(error).split())[:200]}); run the same command again"
            ) from None
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def make_deterministic() -> None:
    """Make kernels add in a fixed order, so that a resumed run gives the same bits."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # no code here reads uninitialised memory


def parallel_kind(asked: Kind | Literal["auto"], model: torch.nn.Module, own: Ranks) -> Kind:
    """The kind to use, the same on every rank; resolves `auto`.

    DDP, the simpler one, if every rank can hold the whole state and its GPU copies to the others directly; both are
    equally fast then. Otherwise FSDP2, which is 1.1 times as fast without direct copies (docs/measurements.md).
    """
    if asked != "auto":
        return asked
    numbers = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return "ddp" if own.all(own.holds(STATE_BYTES * numbers) and own.copies_directly) else "fsdp2"


def wrap(
    model: torch.nn.Module, kind: Kind, own: Ranks, compute: torch.dtype, reshard: bool = False
) -> torch.nn.Module:
    """Wrap `model`, which is on its device, so that gradients are averaged over ranks.

    Call the result, with gradients or without; `model` keeps its parameter names. The drafter's layer is used in
    every TTT step, so its weights stay gathered until the backward pass ends. FSDP2 takes the matrices as one unit,
    gathered as `compute`, to which the forward pass casts them. Vectors (the norms' weights) are a second unit,
    gathered in fp32: rounded to bf16 they would not change until updates add up to 0.4%. The target's frozen weights
    stay whole on every rank, since gathering them in each step costs more.
    """
    if own.world == 1:
        return model
    if kind == "ddp":
        # Every rank has read the same frozen weights and vocabulary map, so DDP need not broadcast them.
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        frozen += [name for name, _ in model.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, frozen)
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
    """Gather a sharded tensor; every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def scatter(tensor: Tensor | None, parameter: Tensor) -> Tensor:
    """Rank 0's whole `tensor`, placed and sharded like `parameter`. Every rank calls this, the others with None."""
    if tensor is None:
        tensor = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    tensor = place_like(tensor, parameter)  # for a sharded one this scatters rank 0's values
    if dist.is_initialized() and not isinstance(parameter, DTensor):
        dist.broadcast(tensor, src=0)
    return tensor


def place_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, placed and sharded like `parameter`."""
    tensor = tensor.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
    return tensor
