"""The fingerprint: every change of a checkpoint is seen, and a difference is told by field."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddbatch.data.fingerprint import HashMode, differences, hash_files, hash_text, hash_weights


def write_weights(folder: Path, size: int, name: str = "model.safetensors") -> Path:
    """A file with a header of 8 + 32 bytes and then `size` bytes."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    content = bytes(number * 7 % 251 for number in range(min(size, 4096))) * (size // 4096 + 1)
    file.write_bytes((32).to_bytes(8, "little") + b"{" + b" " * 30 + b"}" + content[:size])
    return file


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("mode", ["fast", "full"])
@pytest.mark.parametrize("size", [0, 1, 5000, 65_536 * 3 + 1])
def test_equal_files_have_equal_digests_wherever_they_are(
    tmp_path: Path, mode: HashMode, size: int
) -> None:
    for place in ("a", "b"):
        write_weights(tmp_path / place, size)
    assert hash_weights(tmp_path / "a", mode) == hash_weights(tmp_path / "b", mode)


@pytest.mark.parametrize("mode", ["fast", "full"])
@pytest.mark.parametrize("place", [0, 9, 39, 40, 30_000, -1])
def test_one_bit_of_a_small_file_changes_the_digest(
    tmp_path: Path, mode: HashMode, place: int
) -> None:
    file = write_weights(tmp_path, 60_001)
    before = hash_weights(tmp_path, mode)
    flip(file, place)
    assert hash_weights(tmp_path, mode) != before


def test_a_large_file_is_sampled_by_fast_and_read_by_full(tmp_path: Path) -> None:
    file = write_weights(tmp_path, 20_000_000)
    between = 40 + 65_536 + 1000  # behind the first sample, before the second
    before = {mode: hash_weights(tmp_path, mode) for mode in ("fast", "full")}
    flip(file, between)
    assert hash_weights(tmp_path, "fast") == before["fast"]
    assert hash_weights(tmp_path, "full") != before["full"]
    flip(file, between)
    for place in (8, 39, 45, -1):
        flip(file, place)
        assert hash_weights(tmp_path, "fast") != before["fast"]
        flip(file, place)


def test_names_and_sizes_and_the_mode_count(tmp_path: Path) -> None:
    write_weights(tmp_path / "a", 99)
    write_weights(tmp_path / "b", 100)
    write_weights(tmp_path / "c", 99, "other.safetensors")
    write_weights(tmp_path / "d", 99)
    write_weights(tmp_path / "d", 9, "second.safetensors")
    digests = {hash_weights(tmp_path / name, "fast") for name in "abcd"}
    assert len(digests) == 4
    assert hash_weights(tmp_path / "a", "full") not in digests


def test_small_files_count_with_their_absence(tmp_path: Path) -> None:
    names = ("tokenizer.json", "tokenizer_config.json")
    digests = {hash_files(tmp_path, names)}
    (tmp_path / names[0]).write_text("")
    digests.add(hash_files(tmp_path, names))
    (tmp_path / names[0]).write_text("x")
    digests.add(hash_files(tmp_path, names))
    (tmp_path / names[0]).unlink()
    (tmp_path / names[1]).write_text("x")
    digests.add(hash_files(tmp_path, names))
    assert len(digests) == 4


def test_differences_name_the_field_and_both_values() -> None:
    then = {"sampling.seed": 0, "a": [1], "model weights": hash_text("x"), "gone": 1, "same": 2}
    now = {"sampling.seed": 1, "a": [1, 2], "model weights": hash_text("y"), "new": "z", "same": 2}
    said = differences(then, now)
    assert said[0] == "a: [1] in the run, [1, 2] now"
    assert said[1] == "gone: 1 in the run, null now"
    assert said[2].startswith("model weights: digest 2d711642b726 in the run, digest a1fce4363854")
    assert said[3:] == ['new: null in the run, "z" now', "sampling.seed: 0 in the run, 1 now"]
    assert differences(then, then) == []


def test_no_text_is_not_the_empty_text() -> None:
    assert hash_text(None) is None
    assert hash_text("") is not None
