"""The Hugging Face model family: importing this module registers it with AutoConfig, AutoModel and AutoModelForCausalLM.

Tested with Transformers 5.22.2, 5.16.1 and 5.10.4, the lowest; with the latter everything but assisted decoding works.
"""

try:
    import transformers
except ImportError as error:
    raise ImportError('rla.models needs Transformers: pip install "residual-linear-attention[hf]"') from error

from .cache import RLACache as RLACache
from .configuration_rla import RLAConfig as RLAConfig
from .modeling_rla import RLAForCausalLM as RLAForCausalLM
from .modeling_rla import RLAModel as RLAModel
from .pretrained import RLAPreTrainedModel as RLAPreTrainedModel

transformers.AutoConfig.register("rla", RLAConfig, exist_ok=True)
transformers.AutoModel.register(RLAConfig, RLAModel, exist_ok=True)
transformers.AutoModelForCausalLM.register(RLAConfig, RLAForCausalLM, exist_ok=True)
