"""A folder of forced documents for tests of training: the bundled model's own greedy answers to prompts of no sense."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import torch

from backend.drafters.hot_vocab import Coverage, Header, HotVocab
from backend.engine.parameters import SamplingParams
from backend.engine.runner import Runner
from backend.models.qwen3_5 import Qwen35
from backend.models.student import StudentBlock, StudentConfig
from backend.models.weights import LoadedModel, load_model
from backend.text.tokenizer import ChatTokenizer
from tests.checkpoints import BUNDLED
from tests.decoding import Request, decode
from training.data import Document, Forced
from training.distillation.native import LearningStudent
from training.distillation.teacher import Teacher
from training.force import Readings, force_documents
from training.forced import FORMAT, FORMAT_VERSION, digest, write_shard
from training.student import initialise

PROMPT, ANSWER, HELD_OUT = 6, 20, 3
SMALL = {"d_inner": 32, "intermediate_size": 32, "num_attention_heads": 1}


@cache
def answers(count: int = 14) -> tuple[LoadedModel, list[Forced]]:
    """So many documents, the first `HELD_OUT` held out, forced in bfloat16."""
    loaded = load_model(BUNDLED, torch.device("cpu"), torch.bfloat16, with_mtp=False)
    runner = Runner(loaded.model)
    prompts = np.random.default_rng(0).integers(300, 3000, (count, PROMPT)).tolist()
    greedy = SamplingParams(temperature=0.0)
    outcomes = decode(runner, None, 0, [Request(tuple(prompt), greedy, ANSWER) for prompt in prompts], together=count)
    documents = [
        Document(
            id=str(i),
            tokens=np.array([*prompt, *outcome.tokens], dtype=np.int32),
            prompt_length=PROMPT,
            logprobs=np.full(PROMPT + ANSWER, np.nan, dtype=np.float32),
            held_out=i < HELD_OUT,
        )
        for i, (prompt, outcome) in enumerate(zip(prompts, outcomes, strict=True))
    ]
    return loaded, force_documents(runner, documents, readings=Readings(loaded.config.vocab_size))


def write_answers(folder: Path, documents: list[Forced] | None = None) -> Path:
    """The folder, as an extraction leaves one."""
    loaded, made = answers()
    made = made if documents is None else documents
    dtype = str(made[0].hidden.dtype).removeprefix("torch.")
    tokenizer = ChatTokenizer.load(BUNDLED)
    fingerprints = {
        "weights": loaded.weights,
        "tokenizer": tokenizer.fingerprint,
        "chat_template": tokenizer.template_fingerprint,
        "build": "a test's",
    }
    folder.mkdir()
    shard = folder / "forced-00000.npz"
    with shard.open("wb") as file:
        write_shard(file, made, {"dtype": dtype, "fingerprints": fingerprints})
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "fingerprints": fingerprints,
        "dtype": dtype,
        "d2t_sha256": None,
        "counts": {"documents": len(made), "answer_tokens": sum(len(one.document.answer) for one in made)},
        "shards": [{"file": shard.name, "sha256": digest(shard)}],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def write_hot(path: Path, size: int = 96) -> Path:
    """A hot vocabulary of the answers' ids, and the lowest others."""
    found = sorted({token for forced in answers()[1] for token in forced.document.answer})[:size]
    more = [token for token in range(size) if token not in found][: size - len(found)]
    ids = torch.tensor(sorted(found + more), dtype=torch.int32)
    none = Coverage(covered=0, tokens=0)
    header = Header(tokenizer=ChatTokenizer.load(BUNDLED).fingerprint, train=none, held_out=none, sources=[])
    HotVocab(ids, torch.zeros(len(ids), dtype=torch.int64), header).save(path)
    return path


@cache
def lesson_of(hot: Path) -> tuple[Qwen35, LearningStudent, Teacher]:
    """The bundled model in float32, a student of it with a cut of its block, and its teacher."""
    loaded = load_model(BUNDLED, torch.device("cpu"), torch.float32, with_mtp=True)
    ids = HotVocab.load(hot, ChatTokenizer.load(BUNDLED).fingerprint, loaded.config.vocab_size).d2t
    config = StudentConfig.preset("sv", loaded.config, len(ids)).model_copy(update=SMALL)
    student = StudentBlock(config, loaded.config, ids)
    initialise(student, loaded.model)
    return loaded.model, LearningStudent(student), Teacher(loaded.model, ids.long())
