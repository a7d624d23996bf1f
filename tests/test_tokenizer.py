"""Model folders: where tokenizer, special tokens and template are found; broken ones refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from encoders import ids_of, make_encoder, make_folder, make_tokenizer, prompt_of
from transformers import PreTrainedTokenizerFast

USER = {"role": "user", "content": "hello"}


def test_raw_text_follows_add_bos_token_as_transformers_does(tmp_path: Path) -> None:
    for number, (adds_bos, flag) in enumerate(((False, True), (True, False), (False, None))):
        config = {} if flag is None else {"add_bos_token": flag}
        folder = make_folder(tmp_path / str(number), adds_bos=adds_bos, **config)
        make_tokenizer(adds_bos=adds_bos).save(str(folder / "twin.json"))
        twin = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "twin.json"), bos_token="<s>", eos_token="</s>", **config
        )
        assert ids_of(make_encoder(folder), "hello all") == twin.encode("hello all")


def test_the_template_is_found_in_each_place_transformers_keeps_it(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "list"}]
    other = tmp_path / "other.jinja"
    other.write_text("mine")
    plain = make_folder(tmp_path / "a", chat_template="string")
    listed = make_folder(tmp_path / "b", chat_template=named)
    both = make_folder(tmp_path / "c", chat_template="string")
    (both / "chat_template.jinja").write_text("file")
    bare = make_folder(tmp_path / "d")
    for folder, template, text in (
        (plain, "auto", "string"),
        (listed, "auto", "list"),
        (both, "auto", "file"),
        (both, "none", "prompt"),
        (both, str(other), "mine"),
        (bare, "auto", "prompt"),
    ):
        assert make_encoder(folder, template).render(prompt_of("prompt")) == text
    for template in ("auto", "none"):
        with pytest.raises(ValueError, match=rf"data.template={template}: .*messages"):
            ids_of(make_encoder(bare, template), [USER])
    shutil.rmtree(bare)
    with pytest.raises(ValueError, match=r"the templates \['rag'\] and no default"):
        make_encoder(make_folder(bare, chat_template=named[:1]))


def test_the_eos_token_is_read_from_either_form(tmp_path: Path) -> None:
    eos = make_tokenizer().token_to_id("</s>")
    assert make_encoder(make_folder(tmp_path / "a")).eos_token_id == eos
    assert make_encoder(make_folder(tmp_path / "b", eos_token="</s>")).eos_token_id == eos
    assert make_encoder(make_folder(tmp_path / "c", eos_token=None)).eos_token_id is None
    older = make_folder(tmp_path / "d", eos_token=None)
    (older / "tokenizer_config.json").unlink()
    (older / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    assert make_encoder(older).eos_token_id == eos


def test_a_broken_model_folder_is_refused_by_file_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.path=.*tokenizer\.json is missing"):
        make_encoder(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        for content in ("{", "[]"):
            folder = make_folder(tmp_path / "model")
            (folder / name).write_text(content)
            with pytest.raises(ValueError, match=rf"model\.path=.*model:.*{name}"):
                make_encoder(folder)
            shutil.rmtree(folder)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json names eos_token '<none>'"):
        make_encoder(make_folder(tmp_path / "eos", eos_token="<none>"))
    folder = make_folder(tmp_path / "template", chat_template="{% if %}")
    with pytest.raises(ValueError, match=r"model.path=.*data.template=auto.*not compile"):
        make_encoder(folder)
    with pytest.raises(ValueError, match=r"data\.template=gone.*cannot be read"):
        make_encoder(folder, "gone")
    for option, value in (("system_prompt", "x"), ("chat_template_kwargs", {"a": 1})):
        with pytest.raises(ValueError, match=rf"data.{option}=.*no chat template"):
            make_encoder(folder, "none", **{option: value})
