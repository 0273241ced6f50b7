"""Names of tensors: PEFT's canonical spelling, free of adapter names and of the prefixes that wrappers add."""

from __future__ import annotations

from typing import Final

__all__ = ["canonical_tensor_name"]

PREFIX: Final = "base_model.model."
_WRAPPERS: Final = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
# After one of these segments PEFT's modules hold one entry for each adapter, keyed by the adapter's name.
_KEYED: Final = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "trainable_tokens_delta"})


def canonical_tensor_name(key: str, adapter: str | None = None) -> str:
    """The name that `key` has in PEFT's adapter files.

    Args:
        key: A key of a state dict, as it stands in a file or in a live model under any wrapper.
        adapter: The adapter's name inside the model, when `key` comes from a live model; its segment is removed by
            position (the segment after `lora_A`, ...), never by substring.

    Returns:
        `base_model.model.<path>.lora_A.weight` and the like; `lora_magnitude_vector` and `lora_embedding_A` carry no
        `.weight`, a saved module carries no wrapper segment, as PEFT writes them.
    """
    segments = [segment for segment in key.split(".") if segment not in _WRAPPERS]
    while segments and segments[0] == "module":
        segments.pop(0)
    if adapter is not None:
        segments = _without_adapter(segments, adapter)
    name = ".".join(segments)
    return name if name.startswith(PREFIX) else PREFIX + name


def _without_adapter(segments: list[str], adapter: str) -> list[str]:
    for index in range(len(segments) - 1, 0, -1):
        if segments[index] != adapter:
            continue
        before, after = segments[:index], segments[index + 1 :]
        holder = before[-1]
        if holder == "modules_to_save":
            return before[:-1] + after
        if holder == "lora_magnitude_vector":
            return before + (after[1:] if after[:1] == ["weight"] else after)
        if holder in _KEYED:
            return before + after
    return segments
