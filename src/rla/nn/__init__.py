"""Layers: the one token mixer of every linear method, softmax attention, and what they are made of. Needs torch alone."""

from .attention import MixerState as MixerState
from .attention import ResidualAttention as ResidualAttention
from .conv import ShortConvolution as ShortConvolution
from .gates import Gates as Gates
from .mlp import SwiGLU as SwiGLU
from .norms import GatedRMSNorm as GatedRMSNorm
from .norms import RMSNorm as RMSNorm
from .norms import no_weight_decay as no_weight_decay
from .packing import Packing as Packing
from .rotary import rotate as rotate
from .softmax import KVState as KVState
from .softmax import SoftmaxAttention as SoftmaxAttention
from .softmax import causal_mask as causal_mask
