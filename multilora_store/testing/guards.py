"""Guards for the tests of a training code: a model is sound, a store is whole, a step moved one adapter alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from multilora_store.errors import AuditError, DamagedError, UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from multilora_store.storage import Store

__all__ = ["Guard"]


class Guard:
    """`guard(model)`, `guard.store(store)`, `with guard.only(model, "a"):`; each raises a typed error."""

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> Any:
        """Audit a model, plain or under any wrapper, on every rank.

        Args:
            model: The model.
            optimizer: With it, trainable parameters in no group and stale ones are found.
            options: As `multilora_store.audit` takes them.

        Returns:
            The report.

        Raises:
            AuditError: each fault is named.
        """
        import multilora_store

        return multilora_store.audit(model, optimizer, **options).raise_if_failed()

    def store(self, store: Store, ref: str | None = None, *, deep: bool = True, profile: str | None = None) -> None:
        """Check stored files, and that a server takes the adapters.

        Args:
            store: The store.
            ref: One version; None: all.
            deep: Hash every byte.
            profile: `vllm`: also lint against it.

        Raises:
            DamagedError: files that are not what was stored.
            UnsupportedError: adapters that the profile's server would refuse.
        """
        from multilora_store.storage.profiles import verify_profile

        faults = [f"{item.subject}: {item.message}" for item in store.verify(ref, deep=deep).findings]
        if faults:
            raise DamagedError(f"{store.url} has {len(faults)} faults: {'; '.join(faults[:5])}", findings=faults)
        if profile is None:
            return
        report = verify_profile(store, None if ref is None else [ref], profile=profile)
        refused = [f"{name}: {item.what}" for name, found in report.adapters.items() for item in found]
        if not report.ok:
            raise UnsupportedError(f"{profile} would not serve {store.url}: {'; '.join(refused[:5])}", findings=refused)

    @contextmanager
    def only(self, model: nn.Module, *names: str) -> Iterator[None]:
        """What runs inside may change the adapters `names` alone: no other adapter, no parameter of the base.

        Raises:
            AuditError: naming every tensor that changed.
        """
        before = self._checksums(model, names)
        yield
        after = self._checksums(model, names)
        moved = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        if moved:
            raise AuditError(
                f"{len(moved)} tensors changed that belong to none of {', '.join(names) or 'no adapter'}",
                why="; ".join(moved[:10]),
                remedy="freeze them, or build the optimizer from the trainable adapters alone",
                tensors=moved,
            )

    @staticmethod
    def _checksums(model: nn.Module, names: tuple[str, ...]) -> dict[str, str]:
        """A digest of this rank's part of every parameter outside the adapters `names`."""

        from multilora_store.assembly.bridge import adapter_names, adapter_parameters, innermost
        from multilora_store.distributed.auditing import checksum

        owners: dict[int, str] = {}
        for name in adapter_names(model):
            owners |= {id(parameter): name for parameter in adapter_parameters(model, name).values()}
        found = {}
        for key, parameter in innermost(model).named_parameters():
            if owners.get(id(parameter)) in names:
                continue
            local: torch.Tensor = getattr(parameter, "to_local", lambda same=parameter: same)()
            found[key] = checksum(local)
        return found
