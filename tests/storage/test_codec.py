"""safetensors: what is written is a function of content, what is read is believed only when it is right."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import same, tensors

from multilora_store.errors import DamagedError, UsageError
from multilora_store.storage.codec import (
    MAX_HEADER,
    encode,
    hash_slots,
    lazy_from_bytes,
    lazy_from_file,
    nonfinite,
    read_header,
)

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.float16,
    torch.bfloat16, torch.int32, torch.float32, torch.int64, torch.float64, torch.complex64,
]  # fmt: skip


def _mixed() -> dict[str, torch.Tensor]:
    found = {f"t{i:02d}.{dtype}": torch.arange(1, 7).reshape(2, 3).to(dtype) for i, dtype in enumerate(DTYPES)}
    found["scalar"] = torch.tensor(1.5)
    found["ü.name"] = torch.ones(3)
    return found


def _file(given: dict[str, torch.Tensor]) -> bytes:
    return b"".join(bytes(part) for part in encode(given).parts)


def _forge(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _slot(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_bytes_are_those_of_the_safetensors_library(tmp_path: Path) -> None:
    for number, given in enumerate([tensors(0), _mixed(), {"one": torch.zeros(1)}]):
        save_file(given, tmp_path / f"{number}", metadata={"format": "pt"})
        assert _file(given) == (tmp_path / f"{number}").read_bytes()


def test_equal_content_gives_equal_bytes_in_any_order_and_layout() -> None:
    given = tensors(0)
    shuffled = {name: given[name] for name in reversed(list(given))}
    transposed = {name: tensor.t().contiguous().t() for name, tensor in given.items()}
    sliced = {name: torch.cat([tensor, tensor])[: tensor.shape[0]] for name, tensor in given.items()}
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in given.items()}
    assert len({_file(one) for one in (given, shuffled, transposed, sliced, parameters)}) == 1
    assert encode(given).header_sha256 == encode(shuffled).header_sha256


def test_contiguous_tensors_are_not_copied() -> None:
    given = {"a": torch.zeros(1000)}
    part = encode(given).parts[1]
    given["a"][0] = 1.0
    assert bytes(part)[:4] == struct.pack("<f", 1.0)


def test_what_is_written_is_read_back_lazily(tmp_path: Path) -> None:
    for given in (tensors(1), _mixed()):
        (tmp_path / "f").write_bytes(_file(given))
        for lazy in (lazy_from_file(tmp_path / "f"), lazy_from_bytes(_file(given), "f")):
            assert same(lazy, given)
            assert len(lazy) == len(given)
            first = next(iter(lazy))
            assert lazy[first] is lazy[first]
        assert same(load_file(tmp_path / "f"), given)


def test_writing_to_what_was_read_leaves_the_file(tmp_path: Path) -> None:
    data = _file(tensors(2))
    (tmp_path / "f").write_bytes(data)
    for tensor in lazy_from_file(tmp_path / "f").values():
        tensor.zero_()
    assert (tmp_path / "f").read_bytes() == data
    lazy = lazy_from_bytes(data, "f")
    for tensor in lazy.values():
        tensor.zero_()
    assert same(lazy_from_bytes(data, "f"), tensors(2))


def test_unaligned_tensors_of_other_writers_are_read() -> None:
    header = {"a": _slot("U8", [1], [0, 1]), "b": _slot("F32", [2], [1, 9])}
    lazy = lazy_from_bytes(_forge(header, b"\x07" + struct.pack("<2f", 1.5, -2.0)), "f")
    assert lazy["b"].tolist() == [1.5, -2.0]
    assert lazy["a"].tolist() == [7]


def test_hashes_are_those_of_the_data() -> None:
    encoded = encode(_mixed())
    data = b"".join(bytes(part) for part in encoded.parts)
    header = read_header(lambda start, length: data[start : start + length], len(data), "f")
    found = {slot.name: digest for slot, digest in hash_slots(header, lambda a, n: data[a : a + n])}
    assert found == {name: info.sha256 for name, info in encoded.infos.items()}
    assert encoded.nbytes == len(data)


def test_a_changed_byte_is_seen_when_the_tensor_is_asked_for() -> None:
    encoded = encode(tensors(3))
    data = bytearray(b"".join(bytes(part) for part in encoded.parts))
    data[-1] ^= 1
    lazy = lazy_from_bytes(data, "f", encoded.infos)
    *good, bad = lazy.header.slots
    for name in good:
        assert lazy[name] is not None
    with pytest.raises(DamagedError, match="SHA-256"):
        lazy[bad]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "without tensors"),
        ({"a": torch.zeros(0)}, "is empty"),
        ({"a": torch.zeros(4, 0)}, "is empty"),
        ({"a": torch.zeros(2, device="meta")}, "no plain data"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "no plain data"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, "cannot hold"),
    ],
)
def test_what_is_no_whole_tensor_is_not_written(given: dict[str, torch.Tensor], message: str) -> None:
    """Cases 4, 68: zero tensors and zero-sized tensors are refused, with the reason."""
    with pytest.raises(UsageError, match=message):
        encode(given)


HOSTILE = {
    "empty": (b"", "0 bytes"),
    "seven bytes": (b"1234567", "7 bytes"),
    "header longer than the file": (struct.pack("<Q", 1000) + b"{}", "claims 1000 bytes"),
    "header of 100 MB and one": (struct.pack("<Q", MAX_HEADER + 1) + b"{}", "at most"),
    "absurd header": (b"\xff" * 64, "at most"),
    "header length 0": (struct.pack("<Q", 0), "claims 0 bytes"),
    "not json": (_forge(b"{]"), "not usable"),
    "not utf-8": (_forge(b'{"\xff": 1}'), "not usable"),
    "deep": (_forge(b'{"a":' * 100_000), "not usable"),
    "an array": (_forge([1]), "brace"),
    "duplicate names": (_forge(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":1}', b"1234"), "twice"),
    "metadata": (_forge({"__metadata__": {"a": 1}}), "metadata"),
    "no dtype": (_forge({"a": {"shape": [1], "data_offsets": [0, 4]}}, b"1234"), "lacks"),
    "a field more": (_forge({"a": {**_slot(), "x": 1}}, b"1234"), "has more"),
    "unknown dtype": (_forge({"a": _slot("F31")}, b"1234"), "unknown dtype"),
    "dtype of a wrong kind": (_forge({"a": _slot(["F32"])}, b"1234"), "unknown dtype"),
    "negative shape": (_forge({"a": _slot(shape=[-1])}, b"1234"), "impossible shape"),
    "boolean shape": (_forge({"a": _slot(shape=[True])}, b"1234"), "impossible shape"),
    "huge shape": (_forge({"a": _slot(shape=[2**62, 2**62])}, b"1234"), "needs"),
    "huge rank": (_forge({"a": _slot(shape=[1] * 1000)}, b"1234"), "impossible shape"),
    "huge shape with a zero": (_forge({"a": _slot(shape=[2**62, 0])}, b"1234"), "needs 0"),
    "shape without bytes": (_forge({"a": _slot(shape=[1000], offsets=[0, 4])}, b"1234"), "needs 4000"),
    "offsets backwards": (_forge({"a": _slot(offsets=[4, 0])}, b"1234"), "needs"),
    "one offset": (_forge({"a": _slot(offsets=[0])}, b"1234"), "offsets"),
    "offsets beyond the end": (_forge({"a": _slot(shape=[2], offsets=[0, 8])}, b"1234"), "truncated"),
    "bytes after the end": (_forge({"a": _slot()}, b"12345"), "longer"),
    "overlap": (_forge({"a": _slot(), "b": _slot(offsets=[2, 6])}, b"123456"), "overlaps"),
    "gap": (_forge({"a": _slot(), "b": _slot(offsets=[8, 12])}, b"1" * 12), "gap"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n", "Git-LFS"),
    "pickle": (pickle.dumps({"a": [1.0] * 100}), "pickle"),
    "zip of a pickle": (b"PK\x03\x04" + b"\x00" * 100, "pickle"),
    "html": (b"<!DOCTYPE html><html>not found</html>", "HTML"),
    "json": (b'{"error": "not found", "status": 404}', "JSON"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_files_that_are_no_safetensors_are_told_apart(case: str, tmp_path: Path) -> None:
    data, message = HOSTILE[case]
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(DamagedError, match=message):
        lazy_from_bytes(data, "f")
    with pytest.raises(DamagedError, match=message) as caught:
        lazy_from_file(tmp_path / "f")
    assert str(tmp_path / "f") in caught.value.what
    assert caught.value.remedy


def test_every_truncation_is_seen() -> None:
    """Case 8: truncated to 0, 7, N-1 bytes, and to every other length."""
    data = _file({"a": torch.arange(8.0), "b": torch.ones(3, dtype=torch.float16)})
    for length in range(len(data)):
        with pytest.raises(DamagedError):
            lazy_from_bytes(data[:length], "f")


def test_mutated_headers_are_read_right_or_refused() -> None:
    """A flipped bit in the header gives a typed error, or a header that still accounts for every byte."""
    data = _file(tensors(0, layers=1))
    end = 8 + int.from_bytes(data[:8], "little")
    for at in range(end):
        for bit in range(8):
            mutated = bytearray(data)
            mutated[at] ^= 1 << bit
            try:
                header = read_header(lambda a, n, m=mutated: bytes(m[a : a + n]), len(mutated), "f")
            except DamagedError:
                continue
            assert sum(slot.end - slot.start for slot in header.slots.values()) == len(data) - header.offset


def test_nonfinite_values_are_found_in_every_float_dtype() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2):
        for value in (float("nan"), float("inf"), float("-inf")):
            if dtype is torch.float8_e4m3fn and value != value.__class__("nan") and abs(value) == float("inf"):
                continue  # this type has no infinity
            bad = torch.tensor([1.0, value, 2.0]).to(dtype)
            assert nonfinite([("bad", bad), ("good", torch.ones(3, dtype=dtype))]) == ["bad"], (dtype, value)
    assert nonfinite([("int", torch.ones(3, dtype=torch.int64))]) == []
