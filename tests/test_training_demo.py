"""How the embedded pair is made: prompts, texts, tokenizer, folders, and the whole script."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer

from ddbatch.demo import demo_folder
from ddbatch.models.dflash import read_drafter_dims
from ddbatch.models.families import read_target_dims
from ddbatch.models.load import check_pair, load_drafter, load_target
from ddbatch.training.checkpoint import (
    draw_weights,
    write_drafter_config,
    write_target_config,
    write_weights,
)
from ddbatch.training.demo import build, prompts
from ddbatch.training.demo.target import DIMS
from ddbatch.training.demo.texts import Text, clean_texts
from ddbatch.training.demo.tokenizer import (
    END,
    SPECIAL_TOKENS,
    as_chat,
    train_tokenizer,
    write_tokenizer,
)
from ddbatch.training.dense import target_states

CPU = torch.device("cpu")
GOOD = (
    "The old library stood at the end of the street, and its windows shone in the morning light. "
    "A curious girl walked in."
)
TINY = replace(DIMS, width=16, heads=2, kv_heads=1, head_width=8, mlp_width=24, vocab=300)


def test_embedded_prompts_are_the_packages_and_in_no_training() -> None:
    table = pq.read_table(demo_folder() / "prompts.parquet")
    embedded = table["prompt"].to_pylist()
    assert embedded == prompts.embedded_prompts()
    assert len(set(table["id"].to_pylist())) == len(set(embedded)) == 24
    trained = prompts.short_prompts() + prompts.long_prompts()
    assert len(trained) == len(set(trained)) > 70_000
    assert not set(trained) & set(embedded)


def test_texts_are_cut_to_whole_sentences_of_the_first_paragraph() -> None:
    raw = [Text("p", f"{GOOD} She was\n\nSecond paragraph."), Text("p", f"{GOOD}\n\nAnother.")]
    assert list(clean_texts(raw)) == [Text("p", GOOD)]
    curly = GOOD.replace("A curious", "\u201cCome in,\u201d said the book\u2019s ghost. A curious")
    assert [text.text for text in clean_texts([Text("p", curly)])] == [
        GOOD.replace("A curious", '"Come in," said the book\'s ghost. A curious')
    ]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("Too short.", id="short"),
        pytest.param(GOOD + " He said so and he said so and he said so.", id="loop"),
        pytest.param(GOOD.replace("library", "**library**"), id="markup"),
        pytest.param("Sorry, " + GOOD + " I am sorry.", id="refusal"),
        pytest.param(GOOD.replace("street", "stra\u00dfe"), id="not_ascii"),
        pytest.param(GOOD.replace("A curious", '"A curious'), id="open_quote"),
        pytest.param("as it was. " + GOOD, id="begins_inside"),
        pytest.param(GOOD.replace(".", ","), id="no_sentence"),
    ],
)
def test_a_text_that_teaches_nothing_good_is_left_out(text: str) -> None:
    assert list(clean_texts([Text("p", text)])) == []
    assert list(clean_texts([Text("p", GOOD)]))


def test_any_text_survives_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([GOOD] * 3, 300)
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    write_tokenizer(tmp_path, tokenizer, 256)
    read = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in (GOOD, " two  spaces\n\ttab", "\u00e9\u4e2d\U0001f600 \x00", ""):
        assert read.decode(read.encode(text).ids) == text


def test_a_prompt_is_taught_as_the_template_renders_it() -> None:
    transformers = pytest.importorskip("transformers")
    read = transformers.AutoTokenizer.from_pretrained(str(demo_folder() / "target"))
    ids = read.apply_chat_template(
        [{"role": "user", "content": GOOD}], add_generation_prompt=True, return_dict=False
    )
    own = Tokenizer.from_file(str(demo_folder() / "target" / "tokenizer.json"))
    assert ids == own.encode(as_chat(GOOD)).ids
    assert read.eos_token == END


def test_the_embedded_target_is_a_qwen3_to_transformers_too() -> None:
    transformers = pytest.importorskip("transformers")
    folder = demo_folder() / "target"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    ours = load_target(folder, read_target_dims(folder), "float32", CPU, 256)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    token_BT = torch.tensor([tokenizer.encode(as_chat(GOOD) + GOOD).ids])
    with torch.no_grad():
        expected_BTV = theirs(token_BT).logits
    found_TV = ours.logits(target_states(ours, token_BT).hidden_BTD[0])
    torch.testing.assert_close(found_TV, expected_BTV[0], atol=1e-4, rtol=0)


def test_the_embedded_files_stay_below_12_megabytes() -> None:
    total = sum(file.stat().st_size for file in demo_folder().rglob("*") if file.is_file())
    assert total <= 12_000_000


def test_what_is_written_is_what_the_loaders_read(tmp_path: Path) -> None:
    build_dims = replace(
        build.DRAFTER_DIMS, decoder=replace(TINY, layers=2, is_tied=False, windows=(None, None))
    )
    for seed, name in enumerate(("target", "drafter")):
        folder = tmp_path / name
        if name == "target":
            write_target_config(folder, TINY)
            dims = read_target_dims(folder)
            assert dims == TINY
            written = build.Target(TINY, torch.float32, CPU, 64)
        else:
            write_drafter_config(folder, build_dims)
            drafter_dims = read_drafter_dims(folder)
            assert replace(drafter_dims.decoder, eos_token_ids=TINY.eos_token_ids) == (
                build_dims.decoder
            )
            check_pair(TINY, drafter_dims, 8)
            written = build.DFlash(build_dims, torch.float32, CPU, 64)
        draw_weights(written.destinations(), layers=2, seed=seed)
        write_weights(folder, written.destinations(), TINY)
        if name == "target":
            read = load_target(folder, dims, "bfloat16", CPU, 64)
        else:
            read = load_drafter(folder, drafter_dims, "bfloat16", CPU, 64)
        for key, place in written.destinations().items():
            assert torch.equal(place.to(torch.bfloat16), read.destinations()[key]), key


def test_the_script_makes_a_pair_that_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All stages behind the teacher, on a tiny scale; the teacher's texts are given."""
    drafter = replace(TINY, layers=1, is_tied=False, windows=(None,))
    monkeypatch.setattr(build, "DIMS", TINY)
    monkeypatch.setattr(build, "DRAFTER_DIMS", replace(build.DRAFTER_DIMS, decoder=drafter))
    monkeypatch.setattr(build, "_NUM_HELD_OUT", 3)
    monkeypatch.setattr(build, "ANSWERED", {"sampling.max_new_tokens": "9", "engine.rows": "4"})
    work, out = tmp_path / "work", tmp_path / "pair"
    given = work / "teacher-short-0" / "completions"
    given.mkdir(parents=True)
    asked = [[{"role": "user", "content": prompt}] for prompt in prompts.short_prompts()[:9]]
    said = [f"{GOOD} It was day {number}.\n\nMore" for number in range(9)]
    pq.write_table(pa.table({"messages": asked, "completion": said}), given / "a.parquet")
    options = ["--work", str(work), "--out", str(out), "--prompts", "2", "--passes", "2"]
    stages = ["prompts", "tokenizer", "target", "answer", "drafter"]
    monkeypatch.setattr(sys, "argv", ["build", *stages, *options, "--device", "cpu"])
    assert build.main() == 0
    said_lines = capfd.readouterr().out
    assert all(f"{stage}: " in said_lines for stage in stages), said_lines
    assert len((work / "texts.jsonl").read_text().splitlines()) == 9
    assert json.loads((out / "drafter" / "config.json").read_text())["block_size"] == 8
    check_pair(read_target_dims(out / "target"), read_drafter_dims(out / "drafter"), None)
