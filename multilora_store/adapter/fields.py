"""The words of PEFT 0.21.2's configurations, so that a file is checked without importing PEFT. A test compares them."""

from __future__ import annotations

from typing import Final

__all__ = ["LORA_FIELDS", "OBSOLETE_FIELDS", "PEFT_TYPES"]

PEFT_TYPES: Final = frozenset(
    "PROMPT_TUNING MULTITASK_PROMPT_TUNING P_TUNING PREFIX_TUNING LORA ADALORA ADAMSS BOFT ADAPTION_PROMPT IA3 BEFT "
    "LILY LOHA LOKR OFT POLY LN_TUNING VERA FROD PVERA FOURIERFT GLORA XLORA HRA VBLORA UNILORA CPT MISS RANDLORA "
    "ROAD TRAINABLE_TOKENS HIRA SHIRA C3A WAVEFT OSF DELORA GRALORA CARTRIDGE TINYLORA PSOFT PEANUT SHADOW "
    "SUPERTUNING DEFT".split()
)

LORA_FIELDS: Final = frozenset(
    "alora_invocation_tokens alpha_pattern arrow_config auto_mapping base_model_name_or_path bias corda_config "
    "ensure_weight_tying eva_config exclude_modules fan_in_fan_out inference_mode init_lora_weights kasa_config "
    "layer_replication layers_pattern layers_to_transform loftq_config lora_alpha lora_bias lora_dropout "
    "lora_ga_config megatron_config megatron_core modules_to_save monteclora_config peft_type peft_version "
    "qalora_group_size r rank_pattern revision runtime_config target_modules target_parameters task_type "
    "trainable_token_indices use_bdlora use_dora use_qalora use_rslora velora_config".split()
)

OBSOLETE_FIELDS: Final = frozenset({"enable_lora", "merge_weights"})
