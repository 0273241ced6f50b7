"""From a manifest to a lock: every reference becomes one version, before anything is read or built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from multilora_store.adapter import Ref, content_digest, is_pattern, source_kind
from multilora_store.errors import ManifestError, NotInStoreError, UntrustedError, UsageError, choices
from multilora_store.manifest import AdapterSpec, Lock, LockEntry, Manifest
from multilora_store.plugins import Registry, default_registry

if TYPE_CHECKING:
    from multilora_store.storage import PeftFolder, Store, StoredAdapter

__all__ = ["Stores", "expand_patterns", "lock_snapshot", "read_source", "resolve_manifest"]


@dataclass(slots=True)
class Stores:
    """The stores that a manifest may speak of, each opened once.

    Attributes:
        default: The store of entries that name none; the keys that it trusts hold for the others too.
        opened: By URL.
    """

    default: Store | None = None
    opened: dict[str, Store] = field(default_factory=dict)

    def of(self, spec: AdapterSpec) -> Store | None:
        """The store of one entry, None if there is none."""
        if spec.store is None:
            return self.default
        if self.default is not None and spec.store == self.default.url:
            return self.default
        return self.at(spec.store)

    def at(self, url: str) -> Store:
        """The store at `url`."""
        if url not in self.opened:
            from multilora_store.storage import open_store

            trusted = None if self.default is None else self.default.files.trusted
            self.opened[url] = open_store(url, trusted_keys=trusted)
        return self.opened[url]

    def stored(self, spec: AdapterSpec, version: str, url: str | None) -> StoredAdapter:
        """What an entry is locked to: a version of the store at `url`, None for the default one.

        Raises:
            UsageError: there is no such store.
        """
        store = self.default
        if url is not None and (store is None or store.url != url):
            store = self.at(url)
        if store is None:
            raise UsageError(f"adapter {spec.name!r} is locked to version {version} of a store that is not given")
        return store.get(f"{spec.source.partition('@')[0]}@{version}")

    def unstored(self, spec: AdapterSpec, registry: Registry | None = None) -> PeftFolder:
        """What an entry's path or URL holds; see `read_source`.

        Raises:
            UntrustedError: only what a trusted key signed may be read.
        """
        if self.default is not None and self.default.files.trusted is not None:
            raise UntrustedError(
                f"adapter {spec.name!r}: {spec.source} lies in no store, and nobody signed it",
                why=f"{self.default.url} was opened with trusted keys, which hold for the whole set",
                remedy="import it into the store with a signing_key, and name it there",
                name=spec.name,
            )
        return read_source(spec.source, registry)


def expand_patterns(adapters: Mapping[str, Any], stores: Stores) -> dict[str, Any]:
    """A manifest in which every entry whose name or source is a pattern (`team/*`) stands for the adapters it matches.

    Args:
        adapters: Name -> source, fields or `AdapterSpec`; a pattern may stand as the name.
        stores: Where the names are looked up.

    Raises:
        NotInStoreError: a pattern matches nothing.
        ManifestError: an adapter is named twice, or there is no store to look in.
    """
    expanded: dict[str, Any] = {}
    for name, value in adapters.items():
        source = _source_of(name, value)
        if not is_pattern(source) or source_kind(source) != "ref":
            found = {name: value}
        else:
            found = _matches(name, source, value, stores)
        for item, entry in found.items():
            if item in expanded:
                raise ManifestError(f"adapter {item!r} is named twice, the second time by {name!r}")
            expanded[item] = entry
    return expanded


def _source_of(name: str, value: Any) -> str:
    if isinstance(value, AdapterSpec):
        return value.source
    if isinstance(value, Mapping):
        return str(value.get("source") or name)
    return value if isinstance(value, str) else name


def _matches(name: str, source: str, value: Any, stores: Stores) -> dict[str, Any]:
    url = value.store if isinstance(value, AdapterSpec) else value.get("store") if isinstance(value, Mapping) else None
    store = stores.at(url) if url else stores.default
    pattern, at, selector = source.partition("@")
    if store is None:
        raise ManifestError(f"adapters {source!r}: there is no store to look for them in", remedy="name a store")
    names = sorted(item for item in store.names() if fnmatchcase(item, pattern))
    if not names:
        raise NotInStoreError(
            f"no adapter of {store.url} matches {source!r}", remedy=choices(pattern, store.names(), noun="adapter")
        )
    given = {key: item for key, item in value.items() if key != "source"} if isinstance(value, Mapping) else {}
    found: dict[str, Any] = {}
    for item in names:
        ref = f"{item}{at}{selector}"
        spec = replace(value, name=item, source=ref) if isinstance(value, AdapterSpec) else {**given, "source": ref}
        found[item] = spec
    return found


def resolve_manifest(
    manifest: Manifest | Mapping[str, Any],
    store: Store | None = None,
    *,
    known: Iterable[str] = (),
    registry: Registry | None = None,
) -> Lock:
    """Resolve every reference of `manifest` to a version.

    Args:
        manifest: The declaration; a plain mapping may hold patterns (`team/*`).
        store: The store of entries that name none.
        known: Names that the configuration knows, for the message when one is found nowhere.
        registry: Where plugins of the kind `source` are looked up; the default one if None.

    Raises:
        NotInStoreError: an adapter that neither the configuration nor the store has; both lists are shown.
        ManifestError: a wrong entry, or sources that lead in a circle.
    """
    stores = Stores(store)
    if not isinstance(manifest, Manifest):
        manifest = Manifest.from_mapping(expand_patterns(manifest, stores) if manifest else manifest)
    elif any(is_pattern(spec.source) and source_kind(spec.source) == "ref" for spec in manifest):
        manifest = Manifest.from_mapping(expand_patterns(manifest.adapters, stores))
    entries = {spec.name: _lock(spec, stores, manifest, tuple(known), registry) for spec in manifest}
    return Lock(entries=entries)


def lock_snapshot(store: Store, snapshot: str = "latest") -> Lock:
    """The set that a snapshot of `store` holds, each adapter in the state in which it was saved.

    Raises:
        NotInStoreError: there is no such snapshot.
    """
    found = store.snapshot(snapshot)
    entries: dict[str, LockEntry] = {}
    for name, member in found.adapters.items():
        version = store.resolve(f"{name}@{member.version}")
        spec = AdapterSpec(
            name=name,
            source=f"{name}@{version.id}",
            active=member.active,
            trainable=member.trainable,
            weight=member.weight,
        )
        entries[name] = LockEntry(spec=spec, version=version.id, digest=version.digest, store=store.url)
    return Lock(entries=entries, snapshot=found.id)


def _lock(
    spec: AdapterSpec, stores: Stores, manifest: Manifest, known: tuple[str, ...], registry: Registry | None
) -> LockEntry:
    if source_kind(spec.source) != "ref":
        folder = stores.unstored(spec, registry)
        return LockEntry(spec=spec, digest=folder_digest(folder))
    store = stores.of(spec)
    if store is None:
        if spec.if_missing == "init":
            return LockEntry(spec=spec)
        raise UsageError(
            f"adapter {spec.name!r}: {spec.source!r} is a reference into a store, and there is no store",
            remedy="name a store, or give a path (./…) or a URL as source",
        )
    try:
        version = store.resolve(spec.source)
    except (NotInStoreError, FileNotFoundError) as error:
        if spec.if_missing == "init":
            return LockEntry(spec=spec)
        if isinstance(error, NotInStoreError):
            raise _missing(spec, store, manifest, known, error) from error
        raise
    return LockEntry(spec=spec, version=version.id, digest=version.digest, store=store.url)


def _missing(
    spec: AdapterSpec, store: Store, manifest: Manifest, known: tuple[str, ...], error: NotInStoreError
) -> Exception:
    wanted = Ref.parse(spec.source).name
    names = store.names()
    if wanted in names:
        return error  # the adapter is there, the version is not: the store has said so better
    chain = [spec.name]
    while wanted not in chain and wanted in manifest.adapters:
        chain.append(wanted)
        source = manifest.adapters[wanted].source
        wanted = Ref.parse(source).name if source_kind(source) == "ref" else ""
    if len(chain) > 1 and wanted == chain[0]:
        return ManifestError(
            f"the sources lead in a circle: {' -> '.join([*chain, wanted])}",
            why=f"none of them is in {store.url}",
            remedy="a source is a version of a store, a path or a URL, never another entry of the manifest",
        )
    facts = {"name": spec.name, "configured": sorted(known), "stored": sorted(names)}
    if Ref.parse(spec.source).name in known:
        return NotInStoreError(
            f"adapter {spec.name!r} is declared, but the store {store.url} does not hold {spec.source!r}",
            why=f"store: {', '.join(sorted(names)) or 'none'}",
            remedy="import it, name a path as its source, or set if_missing=init with a config",
            **facts,
        )
    return NotInStoreError(
        f"adapter {spec.name!r}: {spec.source!r} is in neither the configuration nor the store {store.url}",
        why=f"configuration: {', '.join(sorted(known)) or 'none'}; store: {', '.join(sorted(names)) or 'none'}",
        remedy=choices(Ref.parse(spec.source).name, {*known, *names}, noun="adapter"),
        **facts,
    )


def read_source(source: str, registry: Registry | None = None) -> PeftFolder:
    """Read an adapter that lies in no store: a path, a URL, or what a plugin of the kind `source` reads (`scheme://`).

    Raises:
        ConfigError: it holds no PEFT adapter.
        DamagedError: its files are broken.
        StorageError: it cannot be reached.
    """
    plugins = registry or default_registry()
    scheme = source.partition("://")[0] if "://" in source else ""
    if scheme in plugins.names("source"):
        reader: Callable[[str], PeftFolder] = plugins.get("source", scheme).load()
        return reader(source)
    from multilora_store.storage import read_peft_dir

    return read_peft_dir(source)


def folder_digest(folder: PeftFolder) -> str:
    """The content digest of an adapter in a plain directory: what its version in a store would have."""
    from multilora_store.storage.codec import encode

    return content_digest(folder.config, encode(folder.tensors).infos.values())
