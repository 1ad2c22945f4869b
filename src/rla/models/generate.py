"""`rla generate MODEL --prompt "..."`: stream text from a saved model."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.utils import logging

from . import RLAConfig
from .pretrained import check_name


def main(
    model: Annotated[str, tyro.conf.Positional],
    *,
    prompt: str,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int | None = None,
    device: str | None = None,
) -> int:
    """Continue a prompt and print the text as it comes.

    Example: rla generate ./my-model --prompt "Once upon a time" --temperature 0

    Args:
        model: a folder written by save_pretrained, or a model's name on the Hugging Face Hub, with its tokenizer.
        prompt: the text to continue; "-" reads it from standard input.
        max_new_tokens: when to stop, if the model does not stop by itself.
        temperature: 0 takes the likeliest token each time.
        top_p: sample from the likeliest tokens that make up this probability.
        seed: makes samples repeatable.
        device: such as cuda:0. None: a GPU if there is one.
    """
    problem = _check(max_new_tokens, temperature, top_p)
    if problem is not None:
        return _fail(problem)
    logging.set_verbosity_error()
    try:
        check_name(model)
    except ValueError as error:
        return _fail(str(error))
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        net: Any = AutoModelForCausalLM.from_pretrained(model)
    except (OSError, ValueError) as error:
        return _fail(f"can't open {model!r}: {error}")
    if net.config.model_type != RLAConfig.model_type:
        return _fail(f"{model!r} is a {net.config.model_type} model; expected one of this package (model_type rla)")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    net.to(device)
    if seed is not None:
        torch.manual_seed(seed)
    text = sys.stdin.read() if prompt == "-" else prompt
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False).to(device)
    if inputs["input_ids"].shape[1] == 0:
        return _fail("--prompt: expected at least one token")
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature > 0 else {"do_sample": False}
    pad = net.generation_config.pad_token_id
    if pad is None:
        eos = net.generation_config.eos_token_id
        pad = 0 if eos is None else eos if isinstance(eos, int) else eos[0]
    try:
        net.generate(**inputs, **sampling, max_new_tokens=max_new_tokens, pad_token_id=pad, streamer=TextStreamer(tokenizer))
    except KeyboardInterrupt:
        print()
    return 0


def _check(max_new_tokens: int, temperature: float, top_p: float) -> str | None:
    if max_new_tokens < 1:
        return f"--max-new-tokens: expected at least 1; got {max_new_tokens}"
    if temperature < 0:
        return f"--temperature: expected 0 or more; got {temperature}"
    return None if 0 < top_p <= 1 else f"--top-p: expected a number above 0 and up to 1; got {top_p}"


def _fail(message: str) -> int:
    print(f"rla generate: {message}", file=sys.stderr)
    return 2
