"""Which files are the input: every form of data.path, its order, and every reason to refuse it."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import datasets
import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ddbatch.core import Key
from ddbatch.data.commits import commit
from ddbatch.data.folder import RunFolder
from ddbatch.data.records import PartCounts, PartFile, Record, blocks_of
from ddbatch.data.source.files import Listing, list_inputs
from ddbatch.data.source.formats import Select
from ddbatch.data.source.inputs import scan

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def listed(
    path: Path | str,
    *,
    name: str | None = None,
    revision: str | None = None,
    split: str = "train",
    select: Select = "all",
) -> Listing:
    return list_inputs(str(path), name=name, revision=revision, split=split, select=select)


def names(listing: Listing) -> list[str]:
    return [listing.name_of(file) for file in listing.files]


def values(listing: Listing, column: str) -> list[object]:
    """That column of all rows; None for a row that cannot be read."""
    inputs = scan(listing, limit=None, samples=1, shard_rows=5)
    rows = [row for _, row in inputs.rows(0, inputs.log.num_rows)]
    return [getattr(row, "values", {}).get(column) for row in rows]


def touch(folder: Path, *files: str) -> None:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(b'{"prompt": "p"}\n')


def table(file: Path, **columns: Sequence[object]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file)


def test_a_file_is_itself_below_its_folder(tmp_path: Path) -> None:
    for suffix in (".jsonl", ".jsonl.gz", ".parquet", ".arrow"):
        touch(tmp_path, f"x{suffix}")
        listing = listed(tmp_path / f"x{suffix}")
        assert names(listing) == [f"x{suffix}"]
        assert (listing.root, listing.select, listing.is_run) == (tmp_path, "all", False)


def test_a_folder_gives_its_own_data_files_in_natural_order(tmp_path: Path) -> None:
    touch(tmp_path, "part-10.jsonl", "part-2.parquet", "part-1.arrow", "part-2.jsonl.gz")
    touch(tmp_path, "README.md", "info.json", ".hidden.jsonl", "below/part-3.jsonl", "x.jsonl.tmp")
    expected = ["part-1.arrow", "part-2.jsonl.gz", "part-2.parquet", "part-10.jsonl"]
    assert names(listed(tmp_path)) == expected


def test_a_glob_may_go_into_subfolders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "a/10/x.jsonl", "a/9/x.jsonl", "a/x.jsonl", "b/x.jsonl", ".c/x.jsonl")
    assert names(listed(f"{tmp_path}/a/*.jsonl")) == ["x.jsonl"]
    assert names(listed(f"{tmp_path}/**/*.jsonl")) == [
        "a/9/x.jsonl",
        "a/10/x.jsonl",
        "a/x.jsonl",
        "b/x.jsonl",
    ]
    monkeypatch.chdir(tmp_path)
    listing = listed("[ab]/*.jsonl")
    assert names(listing) == ["a/x.jsonl", "b/x.jsonl"]
    assert listing.root == tmp_path
    # A name that is there is meant as it stands.
    touch(tmp_path, "odd[1].jsonl", "odd1.jsonl")
    assert names(listed(tmp_path / "odd[1].jsonl")) == ["odd[1].jsonl"]


def test_what_is_no_input_is_refused_with_what_is(tmp_path: Path) -> None:
    touch(tmp_path, "x.csv", "only/x.json", "empty/below/x.jsonl")
    for path in (
        "gone.jsonl",
        "gone/deep/er",
        "x.csv",
        "only",
        "empty",
        "none*.jsonl",
        "*.csv",
    ):
        with pytest.raises(ValueError, match=r"data\.path=.*allowed: a \.jsonl, \.jsonl\.gz"):
            listed(tmp_path / path)


def test_options_of_a_hub_data_set_are_refused_for_files(tmp_path: Path) -> None:
    touch(tmp_path, "x.jsonl")
    for path in (tmp_path, tmp_path / "x.jsonl", f"{tmp_path}/*.jsonl"):
        with pytest.raises(ValueError, match=r"data\.split=test: .*allowed: train"):
            listed(path, split="test")
        with pytest.raises(ValueError, match=r"data\.name=en: .*allowed: null"):
            listed(path, name="en")
        with pytest.raises(ValueError, match=r"data\.revision=main: .*allowed: null"):
            listed(path, revision="main")
        with pytest.raises(ValueError, match=r"data\.select=rejected: .*allowed: all"):
            listed(path, select="rejected")


def save(folder: Path, prompts: Sequence[str], **options: int) -> None:
    datasets.Dataset.from_dict({"prompt": list(prompts)}).save_to_disk(folder, **options)


def test_a_saved_data_set_keeps_the_order_that_it_has_noted(tmp_path: Path) -> None:
    save(tmp_path / "saved", [str(n) for n in range(13)], num_shards=3)
    listing = listed(tmp_path / "saved")
    assert values(listing, "prompt") == [str(n) for n in range(13)]
    state = json.loads((tmp_path / "saved/state.json").read_text())
    state["_data_files"].reverse()
    (tmp_path / "saved/state.json").write_text(json.dumps(state))
    assert names(listed(tmp_path / "saved")) == names(listing)[::-1]
    for broken in ("{", "[]", '{"_data_files": [1]}', '{"_data_files": []}'):
        (tmp_path / "saved/state.json").write_text(broken)
        with pytest.raises(ValueError, match=r"data\.path=.*saved"):
            listed(tmp_path / "saved")


def test_a_saved_data_set_dict_needs_a_split_that_it_has(tmp_path: Path) -> None:
    save(tmp_path / "dict/train", ["a"])
    save(tmp_path / "dict/test", ["b", "c"])
    (tmp_path / "dict/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert values(listed(tmp_path / "dict"), "prompt") == ["a"]
    assert values(listed(tmp_path / "dict", split="test"), "prompt") == ["b", "c"]
    with pytest.raises(ValueError, match=r"data\.split=dev: .*allowed: train, test"):
        listed(tmp_path / "dict", split="dev")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub without a network, with one data set; the snapshot's folder."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    place = tmp_path / "hub/datasets--org--name"
    (place / "refs").mkdir(parents=True)
    (place / "refs/main").write_text(COMMIT)
    snapshot = place / "snapshots" / COMMIT
    table(place / "blobs/0", prompt=["a", "b"])
    table(snapshot / "data/test-0.parquet", prompt=["c"])
    table(snapshot / "de/train.parquet", prompt=["d"])
    (snapshot / "data/train-0.parquet").symlink_to(place / "blobs/0")
    (snapshot / "README.md").write_text(
        "---\nconfigs:\n- config_name: en\n  data_files:\n  - {split: train, path: data/train*}\n"
        "  - {split: test, path: data/test*}\n- config_name: de\n  data_files: de/*\n---\n"
    )
    monkeypatch.chdir(tmp_path)
    return snapshot


def test_a_hub_data_set_is_read_from_the_cache_at_its_commit(hub: Path) -> None:
    listing = listed("org/name", name="en")
    assert (names(listing), listing.revision) == (["data/train-0.parquet"], COMMIT)
    assert values(listing, "prompt") == ["a", "b"]
    assert values(listed("org/name", name="en", split="test"), "prompt") == ["c"]
    assert values(listed("org/name", name="de", revision=COMMIT), "prompt") == ["d"]
    (hub / "README.md").unlink()
    assert values(listed("org/name", split="test"), "prompt") == ["c"]


def test_a_hub_data_set_is_refused_with_what_it_has(hub: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.name=null: .*allowed: en, de"):
        listed("org/name")
    with pytest.raises(ValueError, match=r"data\.name=fr: .*allowed: en, de"):
        listed("org/name", name="fr")
    with pytest.raises(ValueError, match=r"data\.split=dev: .*allowed: train, test"):
        listed("org/name", name="en", split="dev")
    for path, revision in (("org/other", None), ("other", None), ("org/name", "v2")):
        with pytest.raises(ValueError, match=rf"data\.path={path}: .*no network"):
            listed(path, revision=revision)
    for path in ("org/na--me", "org/name."):
        with pytest.raises(ValueError, match=rf"data\.path={path}: .*refuses it"):
            listed(path)
    (hub / "data/train-1.csv").write_text("prompt\nx\n")
    with pytest.raises(ValueError, match=r"train-1\.csv of data\.split=train.*allowed: \.jsonl"):
        listed("org/name", name="en")
    (hub / "README.md").write_text("---\nconfigs: 3\n---\n")
    with pytest.raises(ValueError, match=r"data\.path=org/name"):
        listed("org/name")


def test_a_local_folder_wins_over_a_hub_data_set_of_that_name(hub: Path, tmp_path: Path) -> None:
    touch(tmp_path, "org/name/x.jsonl")
    assert names(listed("org/name")) == ["x.jsonl"]


def commit_part(place: Path, shard: int, number: int, **tables: dict[str, list[object]]) -> None:
    """A part of a run: the record's link is made, the files keep their tmp names."""
    folder, files = RunFolder(place), []
    for name, columns in tables.items():
        tmp = folder.tmp("a") / f"{name}-{shard}-{number}"
        table(tmp, **columns)
        files.append(
            PartFile(
                table=name,
                tmp=folder.relative(tmp),
                final=folder.relative(folder.part(name, shard, number)),
                sha256=hashlib.sha256(tmp.read_bytes()).hexdigest(),
                size=tmp.stat().st_size,
                rows=len(next(iter(columns.values()))),
            )
        )
    record = Record(
        shard=shard,
        number=number,
        attempt="a",
        files=tuple(files),
        keys=blocks_of([Key(10 * number, 0, 0)]),
        counts=PartCounts(1, {}, 2, 2, 0, 0, 1),
        closed_at=0.0,
        seconds=1.0,
    )
    assert commit(folder, record)


def make_run(place: Path) -> Path:
    """The folder of a run with two parts of completions and one of rejected rows."""
    (place / ".ddbatch").mkdir(parents=True)
    (place / "manifest.json").write_text("{}")
    rejected = ['{"prompt": "x", "n": 1}', "{", '{"prompt": "y"}']
    commit_part(place, 0, 0, completions={"prompt": ["d"], "finish_reason": ["length"]})
    commit_part(
        place,
        0,
        1,
        completions={"prompt": ["a", "b", "c"], "finish_reason": ["length", "stop", "length"]},
        rejected={"raw_json": [*rejected], "code": ["z"] * 3},
    )
    return place


def test_an_earlier_run_is_an_input_whole_or_in_part(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert not (run / "completions").exists()  # the final names are made by who reads
    listing = listed(run)
    assert listing.is_run
    assert names(listing) == [
        f"completions/shard-00000-part-00000{number}.parquet" for number in (0, 1)
    ]
    assert values(listing, "prompt") == ["d", "a", "b", "c"]
    assert values(listed(run, select="truncated"), "prompt") == ["d", "a", "c"]
    assert values(listed(run, select="rejected"), "prompt") == ["x", None, "y"]


def test_only_committed_files_of_an_earlier_run_are_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    listed(run)
    file = run / "completions/shard-00000-part-000000.parquet"
    shutil.copy(file, run / "completions/copy.parquet")
    assert values(listed(run), "prompt") == ["d", "a", "b", "c"]


def test_an_earlier_run_without_such_rows_says_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / ".ddbatch").mkdir(parents=True)
    (run / "manifest.json").write_text("{}")
    commit_part(run, 0, 0, completions={"prompt": ["a"], "finish_reason": ["stop"]})
    with pytest.raises(ValueError, match=r"data\.select=rejected: this run has no rejected"):
        listed(run, select="rejected")
    with pytest.raises(ValueError, match=r"data\.select=truncated: no row of this run was cut"):
        values(listed(run, select="truncated"), "prompt")
    commit_part(run, 0, 1, completions={"prompt": ["a"]})
    with pytest.raises(ValueError, match=r"part-000001\.parquet cannot be read \(no column finish"):
        values(listed(run, select="truncated"), "prompt")


def test_the_two_hub_libraries_are_imported_only_for_a_hub_data_set(tmp_path: Path) -> None:
    touch(tmp_path, "x.jsonl")
    program = (
        "import sys; from ddbatch.data.source.inputs import scan; "
        "from ddbatch.data.source.files import *; "
        f"found = list_inputs({str(tmp_path)!r}, name=None, revision=None, split='train', "
        "select='all'); inputs = scan(found, limit=None, samples=1, shard_rows=1); "
        "print(len(list(inputs.rows(0, 1))), "
        "sorted({'datasets', 'huggingface_hub', 'torch', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1 []"
