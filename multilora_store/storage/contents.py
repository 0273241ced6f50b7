"""Contents: the files of one version, and `version.json`, which says what they must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from multilora_store.adapter import AdapterConfig, TensorInfo, content_digest, version_id
from multilora_store.errors import DamagedError, StoreFormatError, UsageError
from multilora_store.storage.blobs import Buffer
from multilora_store.storage.codec import EncodedTensors, Header, hash_slots, read_header
from multilora_store.storage.header import whole_numbers
from multilora_store.storage.records import Fields, dump, parse, sha256

__all__ = [
    "CONFIG_FILE",
    "MODEL_FILE",
    "RECORD_FILE",
    "Contents",
    "VersionRecord",
    "encoded_contents",
    "original_contents",
]

CONFIG_FILE: Final = "adapter_config.json"
MODEL_FILE: Final = "adapter_model.safetensors"
RECORD_FILE: Final = "version.json"
RECORD_FORMAT: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """What `version.json` says, a function of the files alone.

    Every byte is covered: the configuration by its own SHA-256; the model file by its size, the SHA-256 of
    its header (length field included) and the SHA-256 of every tensor, which fill the rest without gaps. So
    a tensor is hashed once, for its identity and for its integrity.

    Attributes:
        digest: The content digest.
        config_size, config_sha256: Of `adapter_config.json`.
        model_size: Of `adapter_model.safetensors`.
        header_sha256: Of its header.
        tensors: Every tensor, by name.
    """

    digest: str
    config_size: int
    config_sha256: str
    model_size: int
    header_sha256: str
    tensors: Mapping[str, TensorInfo]

    @property
    def id(self) -> str:
        return version_id(self.digest)

    def sizes(self) -> dict[str, int]:
        """The size of both files, by name."""
        return {CONFIG_FILE: self.config_size, MODEL_FILE: self.model_size}

    def to_bytes(self) -> bytes:
        return dump({
            "format": RECORD_FORMAT,
            "id": self.id,
            "digest": self.digest,
            "files": {
                CONFIG_FILE: {"size": self.config_size, "sha256": self.config_sha256},
                MODEL_FILE: {"size": self.model_size, "header_sha256": self.header_sha256},
            },
            "tensors": {
                t.name: {"dtype": t.dtype, "shape": list(t.shape), "sha256": t.sha256} for t in self.tensors.values()
            },
        })  # fmt: skip

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> VersionRecord:
        """Reads a `version.json`.

        Raises:
            DamagedError: not one, or a hostile value in it.
            StoreFormatError: written in a newer form.
        """
        fields = parse(data, where)
        if fields.whole("format") != RECORD_FORMAT:
            raise StoreFormatError(
                f"{where} has a form that this version does not know", remedy="update multilora_store"
            )
        files = fields.inner("files")
        if set(files.data) != {CONFIG_FILE, MODEL_FILE}:
            files.refuse("files", sorted(files.data), f"{CONFIG_FILE} and {MODEL_FILE}")
        config, model = files.inner(CONFIG_FILE), files.inner(MODEL_FILE)
        record = cls(
            digest=fields.digest("digest"),
            config_size=config.whole("size"),
            config_sha256=config.digest("sha256"),
            model_size=model.whole("size"),
            header_sha256=model.digest("header_sha256"),
            tensors={name: _read_info(name, row) for name, row in fields.inners("tensors").items()},
        )
        if fields.version_id("id") != record.id:
            fields.refuse("id", fields.data["id"], f"{record.id}, the start of its digest,")
        return record


def _read_info(name: str, fields: Fields) -> TensorInfo:
    shape = fields.array("shape")
    if not whole_numbers(shape, 64):
        fields.refuse("shape", shape, "a list of whole numbers")
    try:
        return TensorInfo(
            name=name, dtype=fields.text("dtype", longest=16), shape=tuple(shape), sha256=fields.digest("sha256")
        )
    except StoreFormatError as error:
        raise DamagedError(f"{fields.where} is damaged", why=error.what, where=fields.where) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The files of one version, ready to be written; `record` describes them.

    Attributes:
        config_data: The bytes of `adapter_config.json`.
        model_parts: The bytes of `adapter_model.safetensors`, in pieces that may be views of live tensors.
    """

    record: VersionRecord
    config_data: bytes
    model_parts: tuple[Buffer, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all three files."""
        return self.record.config_size + self.record.model_size + len(self.record.to_bytes())

    def files(self) -> dict[str, tuple[Buffer, ...]]:
        """The files in the order of writing: the record, which makes the folder a version, comes last."""
        return {
            MODEL_FILE: self.model_parts,
            CONFIG_FILE: (self.config_data,),
            RECORD_FILE: (self.record.to_bytes(),),
        }


def encoded_contents(config: AdapterConfig, encoded: EncodedTensors) -> Contents:
    """The contents of a version made from tensors: a function of `config` and the tensors."""
    config_data = config.to_json()
    return _contents(config, config_data, encoded.infos, encoded.parts, encoded.nbytes, encoded.header_sha256)


def original_contents(config: AdapterConfig, files: Mapping[str, Buffer], where: str) -> Contents:
    """The contents of a version whose files' bytes are kept as they are.

    Raises:
        UsageError: files missing or beside the two.
        DamagedError: the model file is not a whole safetensors file.
    """
    if set(files) != {CONFIG_FILE, MODEL_FILE}:
        raise UsageError(
            f"the files of {where} are {', '.join(sorted(files)) or 'none'}",
            remedy=f"give {CONFIG_FILE} and {MODEL_FILE}",
        )
    model = memoryview(files[MODEL_FILE]).cast("B")
    header = read_header(lambda start, length: bytes(model[start : start + length]), len(model), where)
    infos = _infos(header, model)
    head = sha256(bytes(model[: header.offset]))
    return _contents(config, bytes(files[CONFIG_FILE]), infos, (model,), len(model), head)


def _infos(header: Header, model: memoryview) -> dict[str, TensorInfo]:
    return {
        slot.name: TensorInfo(name=slot.name, dtype=slot.dtype, shape=slot.shape, sha256=digest)
        for slot, digest in hash_slots(header, lambda start, length: model[start : start + length])
    }


def _contents(
    config: AdapterConfig,
    config_data: bytes,
    infos: Mapping[str, TensorInfo],
    parts: tuple[Buffer, ...],
    size: int,
    header_sha256: str,
) -> Contents:
    record = VersionRecord(
        digest=content_digest(config, infos.values()),
        config_size=len(config_data),
        config_sha256=sha256(config_data),
        model_size=size,
        header_sha256=header_sha256,
        tensors=dict(infos),
    )
    return Contents(record=record, config_data=config_data, model_parts=parts)
