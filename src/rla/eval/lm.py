"""RLAHarnessLM: our models on lm-evaluation-harness, named "rla" there; prefixes that requests share are computed once.

    import rla.eval.lm, lm_eval
    lm_eval.simple_evaluate("rla", {"pretrained": "./my-model"}, tasks=["wikitext"], device="cpu")

It differs from the harness's own `hf` in how it computes, not in what: scores agree to float32 rounding. A model of linear
layers alone has no longest sequence: unless `max_length` is given, contexts are not cut, and a document's rolling
log-likelihood is that of the whole document. With softmax layers the harness's windows apply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from ..models import RLAConfig
from ..models.configuration_rla import SOFTMAX
from .engine import Engine, Tokens
from .trie import SEGMENT, WORTH

UNBOUNDED = 2**31


@register_model("rla")
class RLAHarnessLM(HFLM):
    """One of our models. `kwargs` are those of the harness's HFLM, which opens it.

    Args:
        pretrained: a folder, a name on the hub, or a model.
        reuse: whether prefixes that requests share are computed once.
        worth: tokens that a shared piece must have to be computed on its own.
        segment: tokens of a row that a pass takes at most.
        batch_size: rows of a pass.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        reuse: bool = True,
        worth: int = WORTH,
        segment: int = SEGMENT,
        batch_size: int | str = 8,
        **kwargs: Any,
    ) -> None:
        if not str(batch_size).isdigit():
            raise ValueError(f"batch_size: expected a number of rows; got {batch_size!r}")
        super().__init__(pretrained, batch_size=int(batch_size), **kwargs)
        if not isinstance(self.config, RLAConfig):
            raise ValueError(
                f"pretrained: expected a model of this package (model_type rla); got a {self.config.model_type} model"
            )
        self.engine = Engine(self.model, batch_size=int(batch_size), reuse=reuse, worth=worth, segment=segment)

    @property
    def max_length(self) -> int:
        if self._max_length or SOFTMAX in self.config.mixers:
            return super().max_length
        return UNBOUNDED

    @property
    def tokens(self) -> Tokens:
        """The count of tokens since the last `reset_tokens`."""
        return self.engine.tokens

    def reset_tokens(self) -> None:
        self.engine.tokens = Tokens()

    def on_progress(self, function: Callable[[int], None]) -> None:
        """Call a function with the number of requests done, each time there are some."""
        self.engine.on_progress = function

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = True, override_bs: int | None = None) -> Any:
        pairs = []
        for _, context, continuation in requests:
            whole = (context + continuation)[-(self.max_length + 1) :]
            pairs.append((whole[:-1], continuation[-(len(whole) - 1) :]))
        scores = self.engine.score(pairs)
        answers = [(score.logprob, score.is_greedy) for score in scores]
        for (text, _, _), answer in zip(requests, answers, strict=True):
            if text is not None:  # a window of a rolling request
                self.cache_hook.add_partial("loglikelihood", text, answer)
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        answers: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(i)
        for members in groups.values():
            given = requests[members[0]].args[1]
            options = normalize_gen_kwargs(given, self.max_gen_toks)
            sampled = options.get("do_sample") or options.get("temperature") or set(options) & {"num_beams", "max_length"}
            if sampled or self.think_end_token is not None:
                texts = super().generate_until([requests[i] for i in members], disable_tqdm=True)
            else:
                texts = self._greedy([requests[i].args[0] for i in members], options)
            for i, text in zip(members, texts, strict=True):
                answers[i] = text
                self.cache_hook.add_partial("generate_until", (requests[i].args[0], given), text)
        return [answers[i] for i in range(len(requests))]

    def _greedy(self, contexts: list[str], options: Any) -> list[str]:
        until = handle_stop_sequences(options.get("until"), eos=self.tok_decode([self.eot_token_id], skip_special_tokens=False))
        count = options["max_gen_toks"]
        room = self.max_length - count
        if room < 1:
            raise ValueError(f"max_gen_toks: expected less than the model's longest sequence, {self.max_length}; got {count}")
        eos = self.model.generation_config.eos_token_id
        final = {self.eot_token_id, *(eos if isinstance(eos, list) else [eos])}

        def stop(tokens: list[int]) -> bool:
            if tokens[-1] in final:
                return True
            text = self.tok_decode(tokens, skip_special_tokens=False)
            return any(piece in text for piece in until)

        encoded = [self.tok_encode(context)[-room:] for context in contexts]
        empty = [i for i, tokens in enumerate(encoded) if not tokens]
        if empty:
            raise ValueError(f"requests: expected at least one token of context; got {contexts[empty[0]]!r}")
        generated = self.engine.generate(encoded, max_tokens=count, stop=stop)
        texts = [self.tok_decode(tokens) for tokens in generated]
        return [postprocess_generated_text(generation=text, stop=until, think_end_token=None) for text in texts]
