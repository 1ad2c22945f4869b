"""The process, its device and the model's layout over processes: torchrun, FSDP2, compilation, in a fixed order.

Alone, or one of many started by torchrun: the same code. Weights are initialised whole, from the seed, and sharded then, so
that they don't depend on the number of processes. The model itself knows nothing of this.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ..models import RLAConfig, RLAForCausalLM
from .recipe import Optimizer, Parallel, RecipeError


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        return self.rank == 0

    def rows(self, total: int) -> range:
        """This process' share of a batch, a contiguous run of its sequences."""
        share = total // self.size
        return range(self.rank * share, (self.rank + 1) * share)

    def sum(self, values: Iterable[float]) -> list[float]:
        """Sums over all processes; each gets the same."""
        x = torch.tensor(list(values), dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(x)  # over gloo: these are numbers of the CPU
        return x.tolist()

    def agree(self, value: object) -> object:
        """What the main process has to say, told to all."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box)
        return box[0]


def start(parallel: Parallel) -> World:
    """Pick the device and join torchrun's process group.

    Alone there is none, or one of one process where FSDP2 is to mix precisions: gloo asks for a network interface, and one
    process that trains in float32 needs no network at all.
    """
    cuda = parallel.device == "cuda" or (parallel.device == "auto" and torch.cuda.is_available())
    if cuda and not torch.cuda.is_available():
        raise RecipeError('parallel.device: torch finds no CUDA device here; expected "cpu" or "auto"')
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend)
    elif parallel.precision != "float32":
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return World(rank, size, device)


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def build(config: RLAConfig, seed: int, parallel: Parallel, world: World) -> RLAForCausalLM:
    """The model, initialised from the seed, then checkpointed, compiled and sharded as the recipe says, in this order."""
    torch.manual_seed(seed)
    model = RLAForCausalLM(config).train()
    if parallel.activation_checkpointing:
        model.checkpoint_activations()
    if parallel.compile:
        for block in model.model.layers:
            block.compile()
    if world.size == 1 and parallel.precision == "float32":
        return model.to(world.device)
    shard(model, parallel, world)
    return model


def shard(model: RLAForCausalLM, parallel: Parallel, world: World) -> None:
    """FSDP2: each block gathers its weights when it runs. Gradients are averaged over processes, in float32."""
    dtype = torch.bfloat16 if parallel.precision == "bfloat16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = _mesh(parallel, world)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _mesh(parallel: Parallel, world: World) -> DeviceMesh:
    if world.size % parallel.replicas:
        raise RecipeError(
            f"parallel.replicas: expected a divisor of the number of processes, {world.size}; got {parallel.replicas}"
        )
    if parallel.replicas == 1:
        return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))
    shape = (parallel.replicas, world.size // parallel.replicas)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))


def accumulate(model: nn.Module, last: bool) -> None:
    """Whether the coming backward pass shall reduce the gradients over processes: the last of a step does."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)


def make_optimizer(model: nn.Module, options: Optimizer) -> torch.optim.AdamW:
    """AdamW, fused, without weight decay for vectors; its moments exist from the start, for checkpoints to be read into."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(options.beta1, options.beta2), eps=options.eps, fused=True)
    for p in parameters:
        optimizer.state[p] = {
            "step": torch.zeros((), device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor that training changes, by name; shards where the model is sharded. Tied weights come once."""
    assert not list(model.buffers()), "a buffer would not be saved"
    state: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        state[f"model.{name}"] = p.detach()
        state |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[p].items()}
    return state


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """The norm of the whole gradient; scaled down to `limit` if that is not 0."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit if limit else float("inf"))
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
