"""What others offer: causal softmax attention, and two implementations of GDN that run on CPUs; and ours on float32 inputs.

    sdpa            torch.nn.functional.scaled_dot_product_attention, causal
    transformers    torch_chunk_gated_delta_rule of Transformers' Qwen3-Next, PyTorch
    onnxruntime     the operator com.microsoft.LinearAttention of ONNX Runtime, C++, forward only
    float32         each of the methods on float32 inputs, beside those of half precision, by the backend that attend chooses

A peer is given its inputs in the layout it wants before the clock starts. The two of GDN are checked against our gdn first.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..doctor import bf16_probe
from ..method import get_method
from ..ops import attend
from ..ops.backends import choose
from .workload import FLOAT32, Contender, Pass, Tokens, Unavailable, Workload, attend_pass, differentiated

Peer = Literal["sdpa", "transformers", "onnxruntime", "float32"]
PEERS = {
    "sdpa": Contender("softmax", "sdpa"),
    "transformers": Contender("gdn", "transformers"),
    "onnxruntime": Contender("gdn", "onnxruntime"),
}
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}  # RMSE ratio between a peer's gdn and ours
CHECKED_TOKENS = 130  # two chunks and a part


def peer_contenders(peers: Sequence[Peer], methods: Sequence[str]) -> list[Contender]:
    """Those of the peers; of float32 one for each method."""
    return [c for p in peers for c in ([Contender(m, FLOAT32) for m in methods] if p == FLOAT32 else [PEERS[p]])]


def prepare(contender: Contender, workload: Workload, tokens: Tokens, which: Pass) -> Callable[[], object]:
    """The pass of a contender over these tokens, ready to be timed; raises Unavailable if it can't run here."""
    if contender.by == "sdpa":
        return _sdpa(workload, tokens, which)
    if contender.by == "transformers":
        _check_agreement("transformers", workload)
        return differentiated(_transformers(), _gdn_inputs(tokens), tokens.do, which)
    if contender.by == "onnxruntime":
        if which == "both":
            raise Unavailable("forward only")
        _check_agreement("onnxruntime", workload)
        return _onnxruntime(workload, tokens)[0]
    if contender.by == FLOAT32:
        wide = Tokens(*(getattr(tokens, field.name).float() for field in dataclasses.fields(tokens)))
        backend = choose(None, wide.q, wide.v, get_method(contender.method))
        return attend_pass(Contender(contender.method, backend), wide, which)
    return attend_pass(contender, tokens, which)


def _gdn_inputs(tokens: Tokens) -> tuple[Tensor, ...]:
    return tokens.q, tokens.k, tokens.v, tokens.log_alpha, tokens.beta


@functools.lru_cache
def _check_agreement(peer: Peer, workload: Workload) -> None:
    """Raise Unavailable unless the peer's output is that of our gdn, up to its scale."""
    tokens = workload.tokens(CHECKED_TOKENS)
    with torch.no_grad():
        expected = attend(*_gdn_inputs(tokens), method="gdn", backend="chunked")[0].float()
        if peer == "onnxruntime":
            run, out = _onnxruntime(workload, tokens)
            run()
        else:
            out = _transformers()(*_gdn_inputs(tokens)).float() * math.sqrt(workload.dim)
    error = ((out - expected).norm() / expected.norm()).item()
    if not error <= TOLERANCE[workload.dtype]:
        raise Unavailable(f"its output differs from our gdn's: RMSE ratio {error:.1e}")


def _sdpa(workload: Workload, tokens: Tokens, which: Pass) -> Callable[[], object]:
    if workload.dtype == "bfloat16" and workload.device == "cpu" and _bf16_crashes():
        raise Unavailable("bfloat16 products crash in this environment; `rla doctor` says what to set")
    q, k, v, do = (x.transpose(1, 2).contiguous() for x in (tokens.q, tokens.k, tokens.v, tokens.do))  # [B, H, T, d]
    return differentiated(functools.partial(F.scaled_dot_product_attention, is_causal=True), (q, k, v), do, which)


@functools.lru_cache
def _bf16_crashes() -> bool:
    return bf16_probe() != 0


def _transformers() -> Callable[..., Tensor]:
    try:
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
    except ImportError as error:
        raise Unavailable(f"not installed ({error})") from error

    def call(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor) -> Tensor:
        return torch_chunk_gated_delta_rule(q, k, v, g=log_alpha, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    return call


def _onnxruntime(workload: Workload, tokens: Tokens) -> tuple[Callable[[], object], Tensor]:
    """The run of a session bound to the tokens, and the tensor [B, T, H, d] that it writes."""
    if workload.dtype != "float32" or workload.device != "cpu":
        raise Unavailable("measured for float32 on the CPU only")
    session = _session(workload.batch, workload.heads, workload.dim, workload.threads)
    q, k = (F.normalize(x, dim=-1) for x in (tokens.q, tokens.k))
    out = torch.empty_like(tokens.v)
    state = tokens.q.new_zeros(workload.batch, workload.heads, workload.dim, workload.dim)
    present = torch.empty_like(state)
    # Tokens go in with their heads flattened: [B, T, H d].
    inputs = {"query": q.flatten(2), "key": k.flatten(2), "value": tokens.v.flatten(2), "past_state": state}
    inputs |= {"decay": tokens.log_alpha, "beta": tokens.beta}
    outputs = {"output": out.flatten(2), "present_state": present}
    binding = session.io_binding()
    for name, x in inputs.items():
        binding.bind_input(name, "cpu", 0, 1, list(x.shape), x.data_ptr())  # 1: onnx.TensorProto.FLOAT
    for name, x in outputs.items():
        binding.bind_output(name, "cpu", 0, 1, list(x.shape), x.data_ptr())
    held = (*inputs.values(), *outputs.values())  # the binding keeps addresses, the closure keeps the tensors
    assert state.data_ptr() % 64 == 0  # torch aligns so; states across cache lines would handicap it
    assert present.data_ptr() % 64 == 0

    def run() -> tuple[Tensor, ...]:
        session.run_with_iobinding(binding)
        return held

    return run, out


@functools.lru_cache
def _session(batch: int, heads: int, dim: int, threads: int) -> Any:
    try:
        import onnxruntime
        from onnx import TensorProto, helper
    except ImportError as error:
        raise Unavailable(f"not installed ({error})") from error
    state: list[int | str] = [batch, heads, dim, dim]
    tokens: list[int | str] = [batch, "T", heads * dim]
    shapes = {"query": tokens, "key": tokens, "value": tokens, "past_state": state}
    shapes |= {"decay": [batch, "T", heads], "beta": [batch, "T", heads]}
    attributes: dict[str, Any] = {"update_rule": "gated_delta", "scale": 1.0, "q_num_heads": heads, "kv_num_heads": heads}
    node = helper.make_node("LinearAttention", list(shapes), ["output", "present_state"], domain="com.microsoft", **attributes)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    outputs = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("output", tokens), ("present_state", state))
    ]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "gdn", inputs, outputs), opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.enable_cpu_mem_arena = False  # an arena keeps what a pass has used, and peak memory could not be told
    options.add_session_config_entry("session.force_spinning_stop", "1")  # its idle threads would slow the next contender
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own exception classes are not importable by a stable name
        raise Unavailable(f"onnxruntime {onnxruntime.__version__} refuses the operator: {error}") from error
