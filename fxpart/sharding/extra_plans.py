"""Tensor-parallel plans of models whose classes in transformers leave most layers whole.

They are those by which vLLM and SGLang split these models. As in transformers, paths have ``*`` for
layer numbers, within the decoder.
"""

from collections.abc import Mapping

__all__ = ["EXTRA_PLANS", "SHARED_BIAS"]

SHARED_BIAS = "shared_bias"
"""Style of a bias that every device adds to its partial sum: each adds an equal part of it."""
_LATENT_ATTENTION = {
    "self_attn.q_proj": "colwise",
    "self_attn.q_b_proj": "colwise",
    "self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
    "self_attn.kv_b_proj": "colwise",
    "self_attn.o_proj": "rowwise",
}
_GPT_OSS = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.o_proj": "rowwise",
    "self_attn.sinks": "colwise",
    # The gates alternate with what they scale, so that consecutive columns belong together.
    "mlp.experts.gate_up_proj": "rowwise",
    "mlp.experts.gate_up_proj_bias": "rowwise",
    "mlp.experts.down_proj": "colwise",
    "mlp.experts.down_proj_bias": SHARED_BIAS,
    "mlp.experts": "moe_tp_experts",
}
EXTRA_PLANS: Mapping[str, Mapping[str, str]] = {
    "DeepseekV3ForCausalLM": _LATENT_ATTENTION,
    "GptOssForCausalLM": _GPT_OSS,
}
"""What is added to the plan of a class, by paths within a layer of its decoder."""
