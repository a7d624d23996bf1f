"""Make the embedded pair anew: `python -m ddbatch.training.demo.build --help`.

Each stage reads files and writes files, so that any of them can be repeated alone:

    prompts    the words' combinations -> WORK/KIND-K.jsonl, OUT/prompts.parquet
    teach      the teacher answers them (job=generate) -> WORK/teacher-KIND-K
    tokenizer  clean texts -> WORK/texts.jsonl, OUT/target/tokenizer.json
    target     a model of the texts -> OUT/target
    answer     the target answers the prompts (job=generate) -> WORK/answers-KIND-K
    drafter    DFlash on the target's own answers -> OUT/drafter
    measure    the pair on its embedded prompts -> WORK/measured-BUDGET, printed

KIND: short or long prompts; K: a worker process. Knows the recipe's numbers for this pair, and
nothing about gradients.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer

from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch.models.dims import DrafterDims
from ddbatch.models.families import read_target_dims
from ddbatch.models.load import load_target
from ddbatch.training.checkpoint import (
    draw_weights,
    write_drafter_config,
    write_target_config,
    write_weights,
)
from ddbatch.training.demo import prompts
from ddbatch.training.demo.target import DIMS, Lessons, held_out_loss, train_target
from ddbatch.training.demo.texts import Text, clean_texts
from ddbatch.training.demo.tokenizer import (
    END,
    MASK,
    SPECIAL_TOKENS,
    as_chat,
    train_tokenizer,
    write_tokenizer,
)
from ddbatch.training.drafter import Recipe, train_drafter
from ddbatch.training.optimiser import Schedule
from ddbatch.training.sequences import Example, Sequences, read_completions

DRAFTER_DIMS = DrafterDims(
    decoder=replace(DIMS, layers=2, mlp_width=512, is_tied=False, windows=(None, None)),
    block=8,
    mask_token_id=SPECIAL_TOKENS.index(MASK),
    tap_layers=(1, 2),
    num_target_layers=DIMS.layers,
)
RECIPE = Recipe(passes=28, rows=128, num_anchors=24, schedule=Schedule(learning_rate=1.5e-3))
TAUGHT = {"sampling.max_new_tokens": "144", "engine.rows": "512"}
# kind of prompts -> how the teacher answers them
TEACHING = {
    "short": {"sampling.n": "24", "sampling.temperature": "0.6", "sampling.top_p": "0.9"},
    "long": {"sampling.n": "1"},
}
# The target is asked as its users ask, greedily and with a temperature.
ANSWERED = {"model.dtype": "float32", "engine.rows": "512"}
ANSWERING = {
    "short": {"sampling.n": "8", "sampling.temperature": "0.7"},
    "long": {"sampling.n": "1"},
}
_NUM_HELD_OUT = 1000  # texts that measure the target
_EVERY = 500  # steps a line


def main() -> int:
    """Run the stages that are asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m ddbatch.training.demo.build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stages", nargs="+", choices=[*_STAGES])
    parser.add_argument("--work", type=Path, required=True, help="folder for what is in between")
    parser.add_argument("--out", type=Path, required=True, help="folder of the pair")
    parser.add_argument("--teacher", type=Path, help="model folder of the teacher")
    parser.add_argument("--prompts", type=int, help="only the first so many")
    parser.add_argument("--kinds", nargs="+", choices=[*TEACHING], default=[*TEACHING])
    parser.add_argument("--workers", type=int, default=1, help="processes that decode")
    parser.add_argument("--seconds", type=float, default=1e9, help="of a generation at most")
    parser.add_argument("--passes", type=int, help="over the texts or the answers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if "teach" in arguments.stages and not (arguments.teacher and arguments.teacher.is_dir()):
        parser.error(f"teach: --teacher={arguments.teacher}: a model folder is needed")
    torch.set_float32_matmul_precision("high")
    for stage in arguments.stages:
        started = time.monotonic()
        _STAGES[stage](arguments)
        print(f"{stage}: {time.monotonic() - started:.0f} s", flush=True)
    return 0


def make_prompts(arguments: argparse.Namespace) -> None:
    """Deal the training prompts to the workers; write the embedded ones."""
    arguments.work.mkdir(parents=True, exist_ok=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for kind, found in (("short", prompts.short_prompts()), ("long", prompts.long_prompts())):
        lines = [json.dumps({"prompt": prompt}) for prompt in found[: arguments.prompts]]
        for worker in range(arguments.workers):
            file = arguments.work / f"{kind}-{worker}.jsonl"
            file.write_text("\n".join(lines[worker :: arguments.workers]) + "\n")
    embedded = prompts.embedded_prompts()
    ids = [f"demo-{number:02d}" for number in range(len(embedded))]
    pq.write_table(pa.table({"id": ids, "prompt": embedded}), arguments.out / "prompts.parquet")


def teach(arguments: argparse.Namespace) -> None:
    """The teacher answers the prompts; the blank line after a paragraph ends it."""
    stop = arguments.work / "stop.txt"
    stop.write_text("\\n\\n\n")
    for kind, options in TEACHING.items():
        if kind in arguments.kinds:
            places = {"model.path": str(arguments.teacher), "sampling.stop_file": str(stop)}
            _generate(arguments, "teacher", kind, {**places, **TAUGHT, **options})


def make_tokenizer(arguments: argparse.Namespace) -> None:
    """Clean the teacher's texts, then learn a vocabulary from them."""
    texts = list(clean_texts(_raw_texts(arguments.work)))
    with (arguments.work / "texts.jsonl").open("w") as file:
        for text in texts:
            file.write(json.dumps(text._asdict()) + "\n")
    print(f"{len(texts):,} texts")
    lines = (line for text in texts for line in (text.prompt, text.text))
    tokenizer = train_tokenizer(lines, DIMS.vocab)
    write_tokenizer(arguments.out / "target", tokenizer, DIMS.max_positions)


def make_target(arguments: argparse.Namespace) -> None:
    """Train the target; its weights are what bfloat16 keeps of them."""
    folder, device = arguments.out / "target", torch.device(arguments.device)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    examples = list(_encoded(arguments.work, tokenizer))
    held_out = Sequences(examples[:_NUM_HELD_OUT], max_len=DIMS.max_positions)
    sequences = Sequences(examples[_NUM_HELD_OUT:], max_len=DIMS.max_positions)
    print(f"{len(sequences):,} texts, {sequences.num_learned:,} tokens")
    target = Target(DIMS, torch.float32, device, DIMS.max_positions)
    draw_weights(target.destinations(), layers=DIMS.layers, seed=0)
    lessons = Lessons()
    if arguments.passes:
        lessons = replace(lessons, passes=arguments.passes)
    started = time.monotonic()
    for step, loss in enumerate(train_target(target, sequences, lessons), 1):
        if step % _EVERY == 0:
            seconds, other = time.monotonic() - started, held_out_loss(target, held_out)
            print(
                f"target: step {step}, loss {loss:.3f}, held out {other:.3f}, {seconds:.0f} s",
                flush=True,
            )
    print(f"target: held-out loss {held_out_loss(target, held_out):.3f} nats a token")
    write_target_config(folder, DIMS)
    write_weights(folder, target.destinations(), DIMS)


def answer(arguments: argparse.Namespace) -> None:
    """The target answers the training prompts."""
    for kind, options in ANSWERING.items():
        places = {"model.path": str(arguments.out / "target")}
        _generate(arguments, "answers", kind, {**places, **ANSWERED, **options})


def make_drafter(arguments: argparse.Namespace) -> None:
    """Train the drafter on the target's answers."""
    device = torch.device(arguments.device)
    examples = [
        example
        for place in sorted(arguments.work.glob("answers-*"))
        for example in read_completions(place)
    ]
    sequences = Sequences(examples, max_len=DIMS.max_positions)
    print(f"{len(sequences):,} answers, {sequences.num_learned:,} tokens")
    folder = arguments.out / "target"
    dims = read_target_dims(folder)
    target = load_target(folder, dims, "float32", device, dims.max_positions)
    block = DRAFTER_DIMS.block
    drafter = DFlash(DRAFTER_DIMS, torch.float32, device, dims.max_positions + block)
    draw_weights(drafter.destinations(), layers=DRAFTER_DIMS.decoder.layers, seed=1)
    recipe = replace(RECIPE, passes=arguments.passes) if arguments.passes else RECIPE
    started = time.monotonic()
    for now in train_drafter(drafter, target, sequences, recipe):
        if now.step % _EVERY == 0:
            seconds = time.monotonic() - started
            print(
                f"drafter: step {now.step} of {now.num_steps}, loss {now.loss:.3f}, "
                f"chain {now.chain_length:.2f}, {seconds:.0f} s",
                flush=True,
            )
    write_drafter_config(arguments.out / "drafter", DRAFTER_DIMS)
    write_weights(arguments.out / "drafter", drafter.destinations(), DRAFTER_DIMS.decoder)


def measure(arguments: argparse.Namespace) -> None:
    """Decode the embedded prompts, plainly and with a tree; acceptance lengths are printed."""
    pair = {
        "model.path": str(arguments.out / "target"),
        "data.path": str(arguments.out / "prompts.parquet"),
        "engine.device": arguments.device,
    }
    for budget in (0, 8, 16, 32):
        options = {
            **pair,
            "drafter.path": str(arguments.out / "drafter") if budget else "null",
            "engine.budget": str(budget),
            "output_dir": str(arguments.work / f"measured-{budget}"),
        }
        subprocess.run(_command(options), check=True)


_STAGES = {
    "prompts": make_prompts,
    "teach": teach,
    "tokenizer": make_tokenizer,
    "target": make_target,
    "answer": answer,
    "drafter": make_drafter,
    "measure": measure,
}


def _command(options: Mapping[str, str]) -> list[str]:
    return [sys.executable, "-m", "ddbatch", *(f"{key}={value}" for key, value in options.items())]


def _generate(
    arguments: argparse.Namespace, name: str, kind: str, options: Mapping[str, str]
) -> None:
    """One run a worker, side by side: the engine of each leaves room on the device."""
    running = []
    for worker in range(arguments.workers):
        places = {
            "data.path": str(arguments.work / f"{kind}-{worker}.jsonl"),
            "output_dir": str(arguments.work / f"{name}-{kind}-{worker}"),
            "engine.device": arguments.device,
        }
        running.append(subprocess.Popen(_command({**options, **places})))
    until = time.monotonic() + arguments.seconds
    for process in running:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # it commits what is finished
    codes = {process.wait() for process in running}
    if not codes <= {0, 75}:
        raise RuntimeError(f"{name}: job=generate ended with {sorted(codes)}")


def _raw_texts(work: Path) -> Iterator[Text]:
    for file in sorted(work.glob("teacher-*/completions/*.parquet")):
        for row in pq.read_table(file, columns=["messages", "completion"]).to_pylist():
            asked = [turn["content"] for turn in row["messages"] if turn["role"] == "user"]
            yield Text(asked[-1], row["completion"])


def _encoded(work: Path, tokenizer: Tokenizer) -> Iterator[Example]:
    """Texts as the chat template shows them, in the order of the file."""
    with (work / "texts.jsonl").open() as file:
        for lines in iter(lambda: list(islice(file, 4096)), []):
            texts = [Text(**json.loads(line)) for line in lines]
            asked = tokenizer.encode_batch([as_chat(text.prompt) for text in texts])
            said = tokenizer.encode_batch([text.text + END for text in texts])
            for prompt, response in zip(asked, said, strict=True):
                yield Example(prompt.ids, response.ids)


if __name__ == "__main__":
    sys.exit(main())
