"""What `learning` learns from: answers captured through the API, and as many tokens of text that nobody generated.

Both as exports of capture files. Conversations are of the kinds that the bundled model was trained on.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from backend.text.tokenizer import ChatTokenizer
from capture.export import held_out, split_of
from capture.export_npz import export_npz
from capture.records import Generation, new_id, utc_now
from capture.store import Store
from capture.writer import CaptureWriter
from tests.checkpoints import tiny
from tests.servers import CHAT, ProcessServer, running_process, serve_command
from training.data import find_shards, read_documents
from training.pretraining import sources
from training.pretraining.conversation import Conversation
from training.pretraining.lessons import LESSONS
from training.pretraining.questions import ask

TALK = ("small_talk", "idea")  # lessons in words; the others are programs and sums
CLASSES = {"python": 0.65, "exercise": 0.2, "talk": 0.15}
STREAMS, LONGEST = 16, 160


@dataclass(frozen=True)
class Asked:
    """A conversation to be answered and what kind it is."""

    conversation: Conversation
    kind: str


def conversations(seed: int) -> Iterator[Asked]:
    """Endless, seeded, no two alike, without reasoning: of the kinds that the bundled model was trained on."""
    facts = [fact for fact in sources.collect() if not sources.is_held_out(fact.module)]
    lessons = {
        kind: [lesson for lesson in LESSONS if (lesson.__name__ in TALK) == (kind == "talk")] for kind in CLASSES
    }
    rng = random.Random(f"learning {seed}")
    seen: set[str] = set()
    while True:
        [kind] = rng.choices(list(CLASSES), list(CLASSES.values()))
        made = ask(rng.choice(facts), rng) if kind == "python" else rng.choice(lessons[kind])(rng)
        if made is None or made.reasoning or (text := json.dumps(made.messages())) in seen:
            continue
        seen.add(text)
        yield Asked(made, kind)


def captured(place: Path, prompts: int, seed: int, progress: Progress) -> Path:
    """The export of so many answers, captured by a server as any client's are."""
    folder = place / "own"
    if (folder / "manifest.json").is_file():
        return folder
    task = progress.add_task("asking", total=prompts)
    database = place / "capture.db"
    database.unlink(missing_ok=True)
    asked = list(itertools.islice(conversations(seed), prompts))
    with (
        running_process(serve_command(tiny(), "--draft-tokens", "4"), database) as server,
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        for _ in pool.map(lambda i: _ask(server, asked[i], i), range(prompts)):
            progress.advance(task)
    with Store.open(database) as store:
        return export_npz(store, folder).folder


def _ask(server: ProcessServer, asked: Asked, number: int) -> None:
    body = {
        "messages": asked.conversation.messages(),
        "temperature": 0.0 if number % 2 else 0.7,
        "seed": number,
        "max_tokens": LONGEST,
        "metadata": {"class": asked.kind},
    }
    server.http.post(CHAT, json=body).raise_for_status()


def templated(place: Path, own: Path, tokenizer: ChatTokenizer, weights: str, seed: int) -> Path:
    """The export of answers that the model did not give: the corpus' own, to other prompts of the same stream, of as
    many tokens as the train split of `own` has. Its held-out documents are those of `own`."""
    folder = place / "generic"
    if (folder / "manifest.json").is_file():
        return folder
    documents = read_documents(find_shards([own]), tokenizer.fingerprint, tokenizer.vocab_size)
    wanted = sum(len(document.answer) for document in documents if not document.held_out)
    database = place / "generic.db"
    database.unlink(missing_ok=True)
    writer = CaptureWriter(database, synchronous="NORMAL")
    writer.start()
    for asked in conversations(seed + 1):
        row = _row(asked.conversation, tokenizer, weights)
        assert row.prompt_tokens is not None
        assert row.completion_tokens is not None
        if held_out(row.prompt_tokens, 0):
            continue
        writer.submit(row)
        wanted -= len(row.completion_tokens)
        if wanted <= 0:
            break
    with Store.open(place / "capture.db") as store:
        for row in store.iterate():
            if split_of(row) == "held_out":
                writer.submit(row)
    assert writer.close(60)
    with Store.open(database) as store:
        return export_npz(store, folder).folder


def _row(conversation: Conversation, tokenizer: ChatTokenizer, weights: str) -> Generation:
    prompt = tokenizer.encode_chat(conversation.messages(), {}, ())
    answer = tokenizer.plain(conversation.turns[-1].answer.strip())
    end = tokenizer.literal_id("<|im_end|>")
    assert end is not None
    return Generation(
        id=new_id(),
        created_at=utc_now(),
        status="finished",
        finish_reason="stop",
        model="corpus",
        weights_fingerprint=weights,  # whose distributions a student of it is to learn
        tokenizer_fingerprint=tokenizer.fingerprint,
        template_fingerprint=tokenizer.template_fingerprint,
        drafter_fingerprint="none",
        build="not generated",
        drafter="none",
        seed=None,
        parameters={},
        request={"messages": conversation.messages()},
        response_text=conversation.turns[-1].answer,
        prompt_tokens=prompt.ids,
        completion_tokens=[*answer[:LONGEST], end],
        logprobs=None,
        steps=[],
        timings={},
    )
