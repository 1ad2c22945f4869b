"""Data: token shards and their order, tokenizers, the built-in text, synthetic recall (MQAR).

`rla prepare` makes shards from text; `rla.data.prepare.prepare` is the same from Python.
"""

from .batches import Batch, TokenBatches
from .builtin import builtin_dataset, builtin_text, unigram_entropy
from .mqar import MQAR, MQARBatches
from .shards import TokenDataset, check_tokenizer
from .tokenizer import end_of_text, fingerprint, load_tokenizer

__all__ = [
    "MQAR",
    "Batch",
    "MQARBatches",
    "TokenBatches",
    "TokenDataset",
    "builtin_dataset",
    "builtin_text",
    "check_tokenizer",
    "end_of_text",
    "fingerprint",
    "load_tokenizer",
    "unigram_entropy",
]
