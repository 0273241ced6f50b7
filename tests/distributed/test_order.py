"""What is added in the wrong order is found and named: adapters after a wrap, other ranks than the file's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import toys
from launch import results

from multilora_store.errors import MultiLoRAError


def late_by_hand() -> list[str]:
    """A base sharded by the user's own code, adapters put on it by PEFT afterwards."""
    from torch.distributed.fsdp import fully_shard

    from multilora_store.assembly.bridge import innermost
    from multilora_store.distributed import audit

    model = toys.build(configs={"a": {"r": 4, "target_modules": ["q_proj"]}})
    base = innermost(model)
    loose = [parameter for name, parameter in base.named_parameters() if "lora_" in name]
    fully_shard(base, ignored_params=set(loose))
    return [str(finding) for finding in audit(model).findings if finding.fault]


def test_adapters_that_the_wrap_does_not_cover_are_named() -> None:
    """Case 13: a wrap that was computed before the injection leaves every adapter tensor out, and audit lists them."""
    for found in results(late_by_hand, 2):
        assert len(found) >= 4
        assert any("lora_A" in line for line in found)
        assert any("lora_B" in line for line in found)


def swap_rank(root: str) -> str:
    """Restore adapter `a`, stored with rank 4, into a model that carries it with rank 8."""
    from multilora_store.distributed import restore, save, shard
    from multilora_store.storage import open_store

    configs: dict[str, Any] = {"a": {"r": 4, "target_modules": ["q_proj"]}}
    save(shard(toys.build(configs=configs)), open_store(root), step=1)
    configs["a"] = {"r": 8, "target_modules": ["q_proj"]}
    other = shard(toys.build(configs=configs))
    before = toys.whole(next(iter(p for n, p in other.named_parameters() if "lora_A" in n))).clone()
    with pytest.raises(MultiLoRAError) as caught:
        restore(other, open_store(root))
    after = toys.whole(next(iter(p for n, p in other.named_parameters() if "lora_A" in n)))
    assert bool((before == after).all())
    return str(caught.value)


def test_another_rank_is_no_swap_in_place(tmp_path: Path) -> None:
    """Case 119: an adapter of another rank does not fit the sharded tensors; it is refused in words, nothing moves."""
    for message in results(swap_rank, 2, str(tmp_path / "store")):
        assert "a" in message
        assert "(4, 16)" in message
        assert "(8, 16)" in message
