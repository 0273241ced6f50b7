"""Dialects: how other tools name and scale a LoRA adapter, read into PEFT's own form by explicit maps of names."""

from __future__ import annotations

from multilora_store.storage.dialects.diffusers import read_diffusers
from multilora_store.storage.dialects.foreign import source
from multilora_store.storage.dialects.gguf_file import read_gguf
from multilora_store.storage.dialects.hub import read_hf
from multilora_store.storage.dialects.kohya import read_kohya
from multilora_store.storage.dialects.legacy import read_legacy, read_peft
from multilora_store.storage.dialects.mlx import read_mlx

__all__ = ["read_diffusers", "read_gguf", "read_hf", "read_kohya", "read_legacy", "read_mlx", "read_peft", "source"]
