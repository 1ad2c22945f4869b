"""Rehearsal: a training step on tensors without memory, with every byte that the real one would hold counted.

The trainer's own model, optimizer and FSDP2 layout run forward and backward on fake tensors, in a process group of N that
sends nothing. From the first to the last use of each storage its bytes count for what it was made for:

    weights, optimizer     float32 shards, AdamW's two moments
    gathered               the weights of the blocks that run, whole, in the dtype of the pass
    activations            what the blocks leave behind for backward, and their temporaries in a forward pass
    op states              of those, what the op keeps: S and R at some of the tokens
    loss                   logits of a chunk, and the gradients of the hidden states and of the head
    gradients              of earlier passes of the step, and of parameters that are done
    backward               gradients of activations, a block's activations when they are computed again
    op workspace           what a kernel of the op takes and gives back
    reduction              buffers of reduce-scatter and all-reduce

Not counted: what the allocator loses between blocks, the CUDA context (about 1 GB), communication libraries' own buffers.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..method import Method
from ..models import RLAConfig, RLAForCausalLM
from ..nn import RMSNorm
from ..ops import triton
from ..ops.attend import _decode
from ..ops.backends import choose
from . import engine
from .recipe import Recipe

STATIC = ("weights", "optimizer", "gradients")  # what is there from one pass to the next
KINDS = (*STATIC, "gathered", "activations", "op states", "loss", "backward", "op workspace", "reduction")
_ATTEND, _ATTEND_BACKWARD = torch.ops.rla.attend.default, torch.ops.rla.attend_backward.default
_PLACES = {op: {x.name: i for i, x in enumerate(op._schema.arguments)} for op in (_ATTEND, _ATTEND_BACKWARD)}
_CHUNK = {2: 64, 4: 32}  # tokens of a chunk of the Triton kernels, by bytes of an element


@dataclass(frozen=True)
class Traffic:
    """Bytes of the tensors that collectives work on in a pass, whole: gathered weights, gradients to be summed."""

    all_gather: int
    reduce_scatter: int
    all_reduce: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, name) + getattr(other, name) for name in ("all_gather", "reduce_scatter", "all_reduce")))

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.all_gather * times, self.reduce_scatter * times, self.all_reduce * times)


@dataclass(frozen=True)
class Rehearsal:
    peak: dict[str, int]  # bytes by kind, at the moment when they are most
    traffic: Traffic  # of a step
    passes: int  # of a step, in each process
    backend: str  # of the op; empty without one

    @property
    def total(self) -> int:
        return sum(self.peak.values())

    @property
    def dynamic(self) -> int:
        """What comes and goes in a pass, the same for any number of shards."""
        return sum(size for kind, size in self.peak.items() if kind not in STATIC)


def rehearse(recipe: Recipe, config: RLAConfig, *, processes: int, device: Literal["gpu", "cpu"] = "gpu") -> Rehearsal:
    """A step of the recipe as the first of so many processes runs it, compilation aside."""
    asked, config = config.backend, copy.deepcopy(config)
    config.backend = "chunked"  # serves everything everywhere; the ledger puts the right one in its place
    world, parallel = engine.World(0, processes, torch.device("cpu")), recipe.parallel
    rows = world.rows(recipe.sequences)
    passes = -(-len(rows) // parallel.micro_sequences)
    ledger, fake = _Ledger(device, asked), FakeTensorMode()
    with _group_of(processes):
        with fake:
            model = RLAForCausalLM(config).train()
        if device == "gpu":
            _fuse_norms(model)
        if parallel.activation_checkpointing:
            model.checkpoint_activations()
        sharded = processes > 1 or parallel.precision != "float32"
        if sharded:
            engine.shard(model, parallel, world)
        with fake:
            optimizer = engine.make_optimizer(model, recipe.optimizer)
            ids = torch.zeros(min(parallel.micro_sequences, len(rows)), recipe.length, dtype=torch.int64)
        for p in model.parameters():
            ledger.enter(p, "weights")
            for moment in optimizer.state[p].values():
                ledger.enter(moment, "optimizer")
            if not sharded:
                p.register_post_accumulate_grad_hook(lambda p: ledger.enter(p.grad, "gradients"))
        model.model.register_forward_hook(lambda *_: ledger.turn("loss"))
        with fake, ledger:
            traffic = Traffic(0, 0, 0)
            # The first pass of a step finds no gradients, those between are alike, the last one reduces them.
            for last in (False, True) if passes > 1 else (True,):
                engine.accumulate(model, last)
                ledger.turn("activations")
                loss = model(input_ids=ids, shift_labels=ids, num_items_in_batch=1.0, use_cache=False).loss
                ledger.turn("backward")
                loss.backward()
                del loss
                ledger.end_pass()
                traffic += ledger.take_traffic() * (1 if last else passes - 1)
    return Rehearsal(ledger.peak, traffic, passes, " and ".join(sorted(ledger.backends)))


@contextmanager
def _group_of(processes: int) -> Iterator[None]:
    """A process group that computes nothing and sends nothing."""
    dist.init_process_group("fake", rank=0, world_size=processes, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass
class _Entry:
    storage: weakref.ref[torch.UntypedStorage]
    size: int
    kind: str


class _Ledger(TorchDispatchMode):
    """The book of storages: what each is for, from its first use to its end, and the moment of the largest sum."""

    def __init__(self, device: str, asked: str | None) -> None:
        super().__init__()
        self.device, self.asked, self.phase = device, asked, "weights"
        self.backends: set[str] = set()
        self.peak: dict[str, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._now = self._most = 0
        self._traffic: Counter[str] = Counter()

    def turn(self, phase: str) -> None:
        """New storages are of this kind from now on."""
        self.phase = phase

    def enter(self, x: Tensor, kind: str) -> None:
        """Count a tensor's storage, or count it for something else."""
        storage = (x.to_local() if isinstance(x, DTensor) else x).untyped_storage()
        key = storage._cdata
        if (entry := self._entries.get(key)) is not None:
            entry.kind = kind
            return
        self._entries[key] = _Entry(weakref.ref(storage, lambda _: self._leave(key)), storage.nbytes(), kind)
        self._now += storage.nbytes()

    def _leave(self, key: int) -> None:
        self._now -= self._entries.pop(key).size

    def end_pass(self) -> None:
        """What a pass leaves behind is gradients."""
        for entry in self._entries.values():
            if entry.kind in ("activations", "loss", "backward", "reduction"):
                entry.kind = "gradients"

    def take_traffic(self) -> Traffic:
        found, self._traffic = self._traffic, Counter()
        return Traffic(found["_allgather_base_"], found["_reduce_scatter_base_"], found["allreduce_"])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes back as operations on shards
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 0  # a check of values: nothing is wrong
        if func is torch.ops.aten.nonzero.default:  # every token has a label
            return args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        backend = ""
        if func in (_ATTEND, _ATTEND_BACKWARD):
            at = _PLACES[func]
            backend = self._backend(args[at["q"]], args[at["v"]], _decode(args[at["method"]]))
            args = (*args[: at["backend"]], backend, *args[at["backend"] + 1 :])
        out = func(*args, **(kwargs or {}))
        self._tell(func, args, kwargs or {}, out)
        workspace = _workspace(func, args) if backend == "triton" else 0
        if self._now + workspace > self._most:
            self._record(workspace)
        return out

    def _backend(self, q: Tensor, v: Tensor, method: Method) -> str:
        """Of the op on the device that is planned for: this machine need not have it."""
        if self.device == "cpu" or self.asked is not None:
            name = choose(self.asked, q, v, method) if self.device == "cpu" else self.asked
        else:
            refused = triton.refuses("cuda", q.dtype, q.shape[3], v.shape[3], method.decay == "vector")
            name = "triton" if refused is None else "chunked"
        assert name is not None
        self.backends.add(name)
        return name

    def _tell(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self._entries:
                self.enter(x, self.phase)
        name = func._schema.name.split("::")[1]
        if func is _ATTEND:
            self.enter(out[3], "op states" if self.phase == "activations" else self.phase)
        elif name == "split_with_sizes_copy":
            for x in kwargs["out"]:
                self.enter(x, "gathered")
        elif name == "chunk_cat":
            self.enter(kwargs["out"], "reduction")
        elif func.namespace == "c10d":
            tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
            self._traffic[name] += max((x.nbytes for x in tensors), default=0)
            for x in tensors:
                self.enter(x, "gathered" if name == "_allgather_base_" else "reduction")

    def _record(self, workspace: int) -> None:
        """A new largest sum, if it stands when storages are asked again: FSDP2 empties and fills some without an operation."""
        peak = dict.fromkeys(KINDS, 0) | {"op workspace": workspace}
        for entry in list(self._entries.values()):
            storage = entry.storage()
            size = 0 if storage is None else storage.nbytes()
            self._now += size - entry.size
            entry.size = size
            peak[entry.kind] += size
        if self._now + workspace > self._most:
            self._most, self.peak = self._now + workspace, peak


def _workspace(func: Any, args: Any) -> int:
    """Bytes that the Triton kernels hold while they run, beyond what they return: the buffers of ops/triton/launch.py.

    The native kernels' scratch space does not grow with the sequence, and is left out.
    """
    at = _PLACES[func]
    q, v, method = args[at["q"]], args[at["v"]], _decode(args[at["method"]])
    (B, T, H, K), (HV, V), item = q.shape, v.shape[2:], q.element_size()
    delta, residual, fitted = method.rule == "delta", method.has_residual, method.has_R
    chunk = _CHUNK[item]
    matrices = (4 if fitted else 3) if delta else 1 + residual
    size = 2 * H * K * item + HV * (matrices * chunk * item + 4)  # of a token: normalised q and k, matrices of its chunk
    if func is _ATTEND_BACKWARD:
        columns = 1 + delta + residual + fitted + (residual and method.loss != "l2")  # y, x, xw, z, e
        states = 2 * (1 + fitted) * K * V / chunk  # before each chunk, and their adjoints
        size += HV * item * (columns * V + 2 * K + states)
    return round(B * T * size)


class _FusedNorm(torch.autograd.Function):
    """What RMSNorm keeps on a GPU: its input and one number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _GPUNorm(nn.Module):
    """Stands in for RMSNorm, gated or not: on a GPU it is one operation, on a CPU several that each keep a tensor."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        x = _FusedNorm.apply(x, self.weight)
        return x if gate is None else torch.mul(x, F.silu(gate))


def _fuse_norms(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, RMSNorm):
                setattr(parent, name, _GPUNorm(child.weight))
