"""Model families that cannot be split, refused by name before anything loads.

Every other model whose MoE layers vLLM builds through `FusedMoEFactory` is split generically. What
this table misses is refused when its first layer is built, for the same reasons.
"""

from __future__ import annotations

from collections.abc import Iterable

from afd_shim.errors import UnsupportedModelError

__all__ = ["REFUSED_ARCHITECTURES", "check_architectures"]

_HASH_ROUTING = "its first layers route by input_ids (hash routing), which do not travel"
_CALLER_INPUT = "it hands shared_experts_input to the MoE runner, which does not travel"
_OWN_STATE = "its routing function reads parameters of the attention side, which do not travel"
_ZERO_EXPERTS = "it has zero experts, whose output needs the routing on the attention side"
_TWO_RUNNERS = "it has two MoE runners in one decoder layer"
_BYPASS = "it builds MoE layers without vLLM's FusedMoEFactory"
_OWN_RUNNER = "it brings a MoE runner of its own"

REFUSED_ARCHITECTURES: dict[str, str] = {
    "DSparkDeepseekV4ForCausalLM": _HASH_ROUTING,
    "DeepseekV41ForCausalLM": _HASH_ROUTING,
    "DeepseekV4ForCausalLM": _HASH_ROUTING,
    "DeepseekV4ForConditionalGeneration": _HASH_ROUTING,
    "DiffusionGemmaForBlockDiffusion": _OWN_STATE,
    "Dots3NoteForCausalLM": _BYPASS,
    "Ernie4_5_VLMoeForConditionalGeneration": _TWO_RUNNERS,
    "FlexOlmoForCausalLM": _OWN_RUNNER,
    "FlintForCausalLM": _BYPASS,
    "Gemma4ForCausalLM": _OWN_STATE,
    "Gemma4ForConditionalGeneration": _OWN_STATE,
    "Gemma4UnifiedForConditionalGeneration": _OWN_STATE,
    "HunYuanMoEV1ForCausalLM": _OWN_RUNNER,
    "InklingForCausalLM": _OWN_STATE,
    "InklingForConditionalGeneration": _OWN_STATE,
    "InternS1ProForConditionalGeneration": _OWN_STATE,
    "K2HorizonForCausalLM": _BYPASS,
    "KimiK3ForConditionalGeneration": _CALLER_INPUT,
    "KimiLinearForCausalLM": _CALLER_INPUT,
    "Kolibri1ForCausalLM": _OWN_RUNNER,
    "LongcatFlashForCausalLM": _ZERO_EXPERTS,
    "LongcatFlashNgramForCausalLM": _ZERO_EXPERTS,
    "MellumForCausalLM": _OWN_RUNNER,
    "MiniCPMForCausalLM": _BYPASS,
    "Moondream3ForCausalLM": _BYPASS,
    "HfMoondream": _BYPASS,
    "MuseSparkForConditionalGeneration": _OWN_RUNNER,
    "MuseSpark1xForCausalLM": _OWN_RUNNER,
    "NomicBertModel": _BYPASS,
    "Step5ForCausalLM": _OWN_RUNNER,
    "TransformersMoEEmbeddingModel": _OWN_RUNNER,
    "TransformersMoEForCausalLM": _OWN_RUNNER,
    "TransformersMoEForMTP": _OWN_RUNNER,
    "TransformersMoEForSequenceClassification": _OWN_RUNNER,
    "TransformersMultiModalMoEForCausalLM": _OWN_RUNNER,
}
"""Architecture, as `config.json` names it, to the reason it cannot be split."""


def check_architectures(architectures: Iterable[str]) -> None:
    """Refuse a model by name.

    Raises:
        UnsupportedModelError: naming the architecture and the reason.

    """
    for architecture in architectures:
        reason = REFUSED_ARCHITECTURES.get(architecture)
        if reason is not None:
            raise UnsupportedModelError(
                f"{architecture} cannot be split: {reason}. Serve it without the 'afd' configuration.",
                key="model",
            )
