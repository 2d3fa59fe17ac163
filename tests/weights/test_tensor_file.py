"""The three kinds of files: readable by the safetensors library, and no damage goes unnoticed."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

import lowbit
from lowbit.search.files import FILE as INDEX
from lowbit.weights.packed_file import _FILE as PACKED
from lowbit.weights.tensor_file import StoredTensor, TensorFile

torch = pytest.importorskip("torch")

from lowbit.torch import Int4WeightOnlyConfig, load, quantize_, save  # noqa: E402
from lowbit.torch.files import FILE as MODEL  # noqa: E402

RNG = np.random.default_rng(0)
MATRIX = lowbit.quantize(
    RNG.standard_normal((9, 3)), "uint4", axis=1, group_size=8, group_axis=0, symmetric=False
)
PLAIN = TensorFile("lowbit.test", "test", "2", older=("1",))


class Kind(NamedTuple):
    """A kind of file: how one is written, and read with all checks, and with fewer."""

    file: TensorFile
    save: Callable[[Path], None]
    load: Callable[[Path], Any]
    unverified: Callable[[Path], Any]


def _save_index(path: Path) -> None:
    index = lowbit.VectorIndex(5, 8, scale="dimension", metric="l2")
    index.add(RNG.standard_normal((3, 5)).astype(np.float32))
    index.save(path)


def _save_model(path: Path) -> None:
    save(quantize_(torch.nn.Linear(9, 3), Int4WeightOnlyConfig(8)), path)


KINDS = {
    "packed": Kind(
        PACKED,
        lambda path: lowbit.save_packed(lowbit.pack(MATRIX), path),
        lambda path: lowbit.load_packed(path, verify=True),
        lowbit.load_packed,
    ),
    "index": Kind(
        INDEX,
        _save_index,
        lambda path: lowbit.VectorIndex.load(path, verify=True),
        lowbit.VectorIndex.load,
    ),
    "model": Kind(
        MODEL,
        _save_model,
        lambda path: load(torch.nn.Linear(9, 3), path),
        lambda path: load(torch.nn.Linear(9, 3), path, verify=False),
    ),
}


@pytest.fixture(params=KINDS.values(), ids=[*KINDS])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture
def path(kind: Kind, tmp_path: Path) -> Path:
    kind.save(tmp_path / "file")
    return tmp_path / "file"


def _begin(whole: bytes) -> int:
    return 8 + int.from_bytes(whole[:8], "little")


def test_the_library_reads_it(kind: Kind, path: Path) -> None:
    _, tensors = kind.file.read(path, verify=True)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].shape == tensor.shape
        assert found[name].tobytes() == tensor.data.tobytes()
        assert tensor.data.ctypes.data % found[name].dtype.itemsize == 0
    assert _begin(path.read_bytes()) % 64 == 0


def test_what_is_whole_lines_begins_at_one(tmp_path: Path) -> None:
    sizes = (3, 64, 10, 128, 0, 64, 5)
    arrays = {str(i): np.arange(n, dtype=np.int8) for i, n in enumerate(sizes)}
    arrays |= {"four": np.ones((2, 3), np.float32), "none": np.array(7, np.int32)}
    PLAIN.write(tmp_path / "file", {}, {n: StoredTensor.of(a) for n, a in arrays.items()})
    _, found = PLAIN.read(tmp_path / "file", verify=True)
    for name, array in arrays.items():
        assert found[name].data.ctypes.data % (64 if array.nbytes % 64 == 0 else 1) == 0
        np.testing.assert_array_equal(found[name].numpy(), array)
        assert found[name].numpy().shape == array.shape
    with pytest.raises(ValueError, match="read-only"):
        found["1"].data[0] = 1


@pytest.mark.deep("model")
def test_every_flipped_bit_is_noticed(kind: Kind, path: Path) -> None:
    whole = path.read_bytes()
    begin = _begin(whole)
    kind.load(path)
    with open(path, "r+b", buffering=0) as file:
        for at in [*range(begin), *range(begin, len(whole), 17), len(whole) - 1]:
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([whole[at] ^ 1 << bit]), at)
                with pytest.raises(ValueError, match="file"):
                    (kind.unverified if at < begin else kind.load)(path)
            os.pwrite(file.fileno(), whole[at : at + 1], at)
    kind.load(path)


def test_every_other_length_is_noticed(kind: Kind, path: Path) -> None:
    whole = path.read_bytes()
    for size in reversed(range(len(whole))):
        os.truncate(path, size)
        with pytest.raises(ValueError, match="file"):
            kind.unverified(path)
    for tail in (b"\0", b" ", b"\n", bytes(64), whole):
        path.write_bytes(whole + tail)
        with pytest.raises(ValueError, match="file"):
            kind.unverified(path)


def test_parts_that_change_places_are_noticed(kind: Kind, path: Path) -> None:
    """Any two names, numbers or texts of the header, with digests that are not made anew."""
    whole = path.read_bytes()
    begin = _begin(whole)
    header = json.loads(whole[8:begin])
    places = [(n, k) for n, entry in header.items() for k in entry]
    tried = 0
    for i, (one, key) in enumerate(places):
        for other, second in places[:i]:
            changed = json.loads(whole[8:begin])
            changed[one][key], changed[other][second] = header[other][second], header[one][key]
            if changed == header:
                continue
            text = json.dumps(changed).encode().ljust(begin - 8)
            tried += len(text) == begin - 8
            path.write_bytes(len(text).to_bytes(8, "little") + text + whole[begin:])
            with pytest.raises(ValueError, match="file"):
                kind.unverified(path)
    assert tried > 10


def test_digests_are_those_that_the_page_names(kind: Kind, path: Path) -> None:
    whole = path.read_bytes()
    begin = _begin(whole)
    said = json.loads(whole[8:begin])["__metadata__"]
    assert hashlib.sha256(whole[begin:]).hexdigest() == said["data_sha256"]
    blank = whole[8:begin].replace(said["header_sha256"].encode(), b"0" * 64)
    assert hashlib.sha256(blank).hexdigest() == said["header_sha256"]


def test_damaged_numbers_are_not_looked_for_without_verify(kind: Kind, path: Path) -> None:
    whole = path.read_bytes()
    at = json.loads(whole[8 : _begin(whole)])
    name = next(n for n in at if n.endswith(("panels", "weight")))
    damaged = bytearray(whole)
    damaged[_begin(whole) + at[name]["data_offsets"][0]] ^= 1
    path.write_bytes(damaged)
    kind.unverified(path)


def _with_header(path: Path, text: bytes, data: bytes = b"") -> None:
    """A file whose header is this text, after digests that are right."""
    blank = text.replace(b"DATA", hashlib.sha256(data).hexdigest().encode())
    blank = blank.replace(b"DIGEST", b"0" * 64)
    text = blank.replace(b"0" * 64, hashlib.sha256(blank).hexdigest().encode(), 1)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


METADATA = (
    '"__metadata__": {"format": "lowbit.test", "format_version": "2", '
    '"header_sha256": "DIGEST", "data_sha256": "DATA"'
)


def _entry(shape: Any, offsets: Any, dtype: Any = "F32") -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": offsets})


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ('}, "x": ' + _entry([4, 4], [0, 64]) + "}", None),
        ('}, "x": ' + _entry([], [0, 4]) + ', "y": ' + _entry([15], [4, 64]) + "}", None),
        ('}, "x": ' + _entry([4, 4], [0, 60]) + "}", "contradict"),
        ('}, "x": ' + _entry([4, 5], [0, 64]) + "}", "contradict"),
        ('}, "x": ' + _entry([4, 4], [0, 64], "I8") + "}", "contradict"),
        ('}, "x": ' + _entry([15], [4, 64]) + "}", "begins at byte 4"),
        ('}, "x": ' + _entry([15], [0, 60]) + "}", "goes on after its end"),
        ('}, "x": ' + _entry([17], [0, 68]) + "}", "truncated"),
        ('}, "x": ' + _entry([9], [0, 36]) + ', "y": ' + _entry([8], [32, 64]) + "}", "begins"),
        ('}, "x": ' + _entry([16], [0, 64]) + ', "y": ' + _entry([16], [0, 64]) + "}", "begins"),
        ('}, "x": ' + _entry([-4, -4], [0, 64]) + "}", "no shape"),
        ('}, "x": ' + _entry([4.0, 4], [0, 64]) + "}", "no shape"),
        ('}, "x": ' + _entry([True, 16], [0, 64]) + "}", "no shape"),
        ('}, "x": ' + _entry(16, [0, 64]) + "}", "no shape"),
        ('}, "x": ' + _entry("16", [0, 64]) + "}", "no shape"),
        ('}, "x": ' + _entry([16], {"0": 64}) + "}", "no shape"),
        ('}, "x": ' + _entry([16], [0, 64, 64]) + "}", "no shape"),
        ('}, "x": ' + _entry([16], [64, 0]) + "}", "contradict"),
        ('}, "x": ' + _entry([1] * 65 + [16], [0, 64]) + "}", "no shape"),
        ('}, "x": ' + _entry([2**62, 4], [0, 64]) + "}", "no shape"),
        ('}, "x": ' + _entry([10**400, 0], [0, 0]) + "}", "no shape"),
        ('}, "x": ' + _entry([2**40, 2**40, 0], [0, 0]) + "}", "no shape"),
        ('}, "x": ' + _entry([2**61, 0], [0, 0]) + "}", "no shape"),
        ('}, "x": ' + _entry([16], [0, 64], "F9") + "}", "unknown dtype"),
        ('}, "x": ' + _entry([16], [0, 64], ["F32"]) + "}", "unknown dtype"),
        ('}, "x": ' + _entry([16], [0, 64], None) + "}", "unknown dtype"),
        ('}, "x": {"dtype": "F32", "shape": [16]}}', "is not dtype, shape"),
        ('}, "x": [16]}', "is not dtype, shape"),
        ('}, "x": ' + "[" * 200_000, "recursion"),
        ('}, "x": ' + '{"a":' * 200_000, "recursion"),
        ('}, "x": ' + _entry([16], [0, 64]) + ', "x": ' + _entry([16], [0, 64]) + "}", "twice"),
        (', "n": 1}}', "not texts"),
        (', "n": null}}', "not texts"),
        ('}, "x": ' + "9" * 5000 + "}", "digits|dtype"),
        ('}, "x": NaN}', "dtype"),
        ("", "Expecting|delimiter"),
        ('}, "\ud800": 1}', "codec"),
    ],
)
def test_forged_headers(rest: str, message: str | None, tmp_path: Path) -> None:
    path = tmp_path / "file"
    _with_header(path, ("{" + METADATA + rest).encode(errors="surrogatepass"), bytes(64))
    if message is None:
        assert sum(t.data.size for t in PLAIN.read(path, verify=True)[1].values()) == 64
        return
    with pytest.raises(ValueError, match=f"file cannot be read as a test: .*({message})"):
        PLAIN.read(path, verify=True)


@pytest.mark.parametrize("length", [0, 1, 2**63, 2**64 - 1, 100_000_001, 65])
def test_forged_lengths(length: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(length.to_bytes(8, "little") + b"{}" + bytes(62))
    with pytest.raises(ValueError, match="file is truncated or not a safetensors file"):
        PLAIN.read(tmp_path / "file", verify=True)


@pytest.mark.parametrize("text", [b"{}", b"[]", b"77", b'{"__metadata__": []}', b"\xff\xfe{}"])
def test_headers_of_other_files(text: bytes, tmp_path: Path) -> None:
    _with_header(tmp_path / "file", text)
    with pytest.raises(ValueError, match="file cannot be read as a test"):
        PLAIN.read(tmp_path / "file", verify=True)


def test_kinds_are_not_taken_for_each_other(kind: Kind, path: Path) -> None:
    for other in KINDS.values():
        if other is not kind:
            with pytest.raises(ValueError, match=f"expected {other.file.format!r}"):
                other.load(path)


@pytest.mark.parametrize("version", ["0", "3", "2 ", ""])
def test_other_versions_are_refused(version: str, tmp_path: Path) -> None:
    TensorFile("lowbit.test", "test", version).write(tmp_path / "file", {}, {})
    with pytest.raises(ValueError, match=f"format version '{version}'; this lowbit reads '1', '2'"):
        PLAIN.read(tmp_path / "file", verify=False)


def test_digests_may_be_missing_in_older_versions_only(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for version in ("1", "2"):
        text = f'{{"__metadata__": {{"format": "lowbit.test", "format_version": "{version}"}}}}'
        _with_header(path, text.encode())
        if version == "1":
            PLAIN.read(path, verify=True)
            continue
        with pytest.raises(ValueError, match="header is not what was written"):
            PLAIN.read(path, verify=True)
    text = '{"__metadata__": {"format": "lowbit.test", "format_version": "1", "data_sha256": ""}}'
    _with_header(path, text.encode())
    with pytest.raises(ValueError, match="header is not what was written"):
        PLAIN.read(path, verify=True)


def test_modes_links_and_full_disks(kind: Kind, path: Path, tmp_path: Path) -> None:
    before = path.read_bytes()
    path.chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    path.write_bytes(b"old")
    kind.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert len(path.read_bytes()) == len(before)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            kind.save(path)  # stops half-way
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]
    kind.load(path)
    with pytest.raises(OSError, match="not a regular file"):
        kind.save(Path("/dev/full"))
