"""The causal language models of transformers that engines for serving are known to have.

Sources: `vllm/model_executor/models/registry.py` of vLLM (commit 0002bff, text generation, and what
it names for its transformers backend), and `conversion/__init__.py` of llama.cpp (commit 00bdaa1,
text models), which its `convert_hf_to_gguf.py` reads. Names that transformers spells otherwise,
such as `MPTForCausalLM`, are left out.
"""

__all__ = ["LLAMA_CPP", "VLLM", "VLLM_WITHOUT_BITSANDBYTES"]

_BOTH = """
    Afmoe Apertus Arcee Bamba Bloom Cohere Cohere2 Dbrx DeepseekV2 DeepseekV3 DeepseekV32 Dots1
    Ernie4_5 Ernie4_5_Moe Exaone4 Falcon FalconH1 FalconMamba Gemma Gemma2 Gemma3 Gemma3n Glm Glm4
    Glm4Moe GPTBigCode GPTNeoX GptOss Granite GraniteMoe GraniteMoeHybrid GraniteMoeShared
    HunYuanDenseV1 HunYuanMoEV1 Jais2 Jamba KimiLinear Lfm2 Lfm2Moe Llama Llama4 Mamba Mamba2
    MiMoV2Flash MiniCPM3 MiniMaxM2 Mistral Mixtral Nemotron NemotronH Olmo Olmo2 Olmo3 Olmoe Phi
    Phi3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe Qwen3Next SeedOss SmolLM3 StableLm Starcoder2
"""
_VLLM = "Cwm FlexOlmo GPTJ LongcatFlash MiniMax Mpt OPT Persimmon Zamba2"
_LLAMA_CPP = "Gemma4 Glm4MoeLite GlmMoeDsa Ministral3 Qwen3_5 Qwen3_5Moe SolarOpen Youtu"


def _classes(names: str) -> frozenset[str]:
    return frozenset({"GPT2LMHeadModel", *(f"{name}ForCausalLM" for name in names.split())})


VLLM_WITHOUT_BITSANDBYTES = _classes(
    "Bloom Dbrx FalconMamba GPTJ GptOss KimiLinear Mamba Mamba2 MiniMax Mpt Persimmon StableLm"
    " Zamba2"
)
"""Those of `VLLM` that its loader for bitsandbytes refuses: their classes have no
`packed_modules_mapping` in vLLM 0.33.0 (vLLM issue 41874), and experts of gpt-oss none that the
loader could use (issue 23632). MiniMax, Mpt and Persimmon, which 0.33.0 no longer has, are not
known to have had one."""

VLLM = _classes(f"{_BOTH} {_VLLM}")
LLAMA_CPP = _classes(f"{_BOTH} {_LLAMA_CPP}")
