"""Files of GGUF: whole, damaged, truncated and hostile."""

from __future__ import annotations

import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from language_models import smollm2, smollm2_metadata

from lowbit.lm.gguf import read


@pytest.fixture
def whole(tmp_path):
    """A small file of the package's writer."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.epsilon", 0.5)
    writer.add_array("tokenizer.ggml.tokens", ["a", "ü", ""])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_bool("yes", True)
    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    writer.add_tensor("plain", values)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("eight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, values


def test_a_whole_file(whole):
    path, values = whole
    file = read(path)
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == 2
    assert file.metadata["llama.epsilon"] == 0.5
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "ü", ""]
    assert file.metadata["numbers"] == [1, 2, 3]
    assert file.metadata["yes"] is True
    assert (file.tensors["plain"].rows() == values).all()
    assert file.tensors["eight"].shape == (4, 64)
    assert np.abs(file.tensors["eight"].rows([2, 0]) - values[[2, 0]]).max() < 0.02


def test_every_truncation_is_an_error_and_takes_no_memory(whole, tmp_path):
    path, _ = whole
    data = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    tracemalloc.start()
    for size in range(0, len(data) - 64, 7):
        cut.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            read(cut)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def header(*, magic=b"GGUF", version=3, tensors=0, entries=0, rest=b""):
    return magic + struct.pack("<IQQ", version, tensors, entries) + rest


def text(value: bytes, size=None):
    return struct.pack("<Q", len(value) if size is None else size) + value


HUGE = 1 << 62
HOSTILE = {
    "begins with": header(magic=b"GGML", rest=b"x" * 40),
    "version 1": header(version=1, rest=b"x" * 40),
    "a count of": header(entries=HUGE, rest=b"x" * 40),
    "header: a count of": header(tensors=HUGE, rest=b"x" * 40),
    "metadata 0: ": header(entries=1, rest=text(b"a", HUGE) + b"x" * 40),
    "a: a count of": header(
        entries=1, rest=text(b"a") + struct.pack("<IIQ", 9, 4, HUGE) + b"x" * 40
    ),
    "a: .*string of": header(
        entries=1, rest=text(b"a") + struct.pack("<IIQ", 9, 8, 2) + text(b"b", HUGE) + b"x" * 40
    ),
    "a: an array of type 9": header(
        entries=1, rest=text(b"a") + struct.pack("<IIQ", 9, 9, 1) + b"x" * 40
    ),
    "a: type 77": header(entries=1, rest=text(b"a") + struct.pack("<I", 77) + b"x" * 40),
    "no UTF-8": header(entries=1, rest=text(b"\xff") + b"x" * 40),
    "tensor 't': 0 dimensions": header(
        tensors=1, rest=text(b"t") + struct.pack("<IIQ", 0, 0, 0) + b"x" * 40
    ),
    "tensor 't': sizes": header(
        tensors=1, rest=text(b"t") + struct.pack("<IQQIQ", 2, HUGE, HUGE, 0, 0) + b"x" * 40
    ),
    "tensor 't': rows of 5": header(
        tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 5, 8, 0) + b"x" * 40
    ),
    "tensor 't': .* bytes from": header(
        tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 4, 0, HUGE) + b"x" * 40
    ),
    "tensor 't': 16 bytes from": header(
        tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 1) + b"x" * 90
    ),
}


@pytest.mark.parametrize("message", HOSTILE)
def test_what_is_hostile_names_the_field(message, tmp_path):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[message])
    with pytest.raises(ValueError, match=message):
        read(path)


def test_types_that_are_not_read_are_named(tmp_path):
    path = tmp_path / "other.gguf"
    path.write_bytes(
        header(tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 256, 10, 0) + b"x" * 400)
    )
    with pytest.raises(NotImplementedError, match=r"'t'.*type Q2_K.*Q4_K"):
        read(path)


def test_an_alignment_that_is_none(tmp_path):
    path = tmp_path / "odd.gguf"
    rest = text(b"general.alignment") + struct.pack("<II", 4, 24)
    path.write_bytes(header(entries=1, rest=rest + b"x" * 40))
    with pytest.raises(ValueError, match=r"general\.alignment: 24"):
        read(path)


@pytest.mark.deep
def test_metadata_of_a_real_file_are_what_the_package_gguf_reads() -> None:
    reader = gguf.GGUFReader(smollm2())
    fields = {key: field.contents() for key, field in reader.fields.items() if "GGUF" not in key}
    assert smollm2_metadata() == fields
