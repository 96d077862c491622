"""From exported shards to a hot vocabulary: count the model's own tokens, keep the most frequent.

Knows shards through `training.data`; the file it makes is backend's, and so is its format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from backend.drafters.hot_vocab import Coverage, Header, HotVocab
from backend.text.tokenizer import ChatTokenizer
from training.data import Shard, read_shard
from training.errors import TrainingError


@dataclass(frozen=True)
class Built:
    """A hot vocabulary and how it came about.

    `documents` were counted, `repeated` left out because another shard holds them too; `distinct` ids occur in the
    train split; `filled` ids of the list neither occur there nor are special.
    """

    hot: HotVocab
    documents: int
    repeated: int
    distinct: int
    filled: int


def build(
    shards: Sequence[Shard],
    tokenizer: ChatTokenizer,
    size: int,
    report: Callable[[int], None] = lambda done: None,
) -> Built:
    """Choose `size` ids: all special tokens, then the model's own tokens of the train split by count (ties to the
    lowest id), then the lowest ids not yet in. A function of the documents and the tokenizer: order changes nothing.

    Documents that several shards hold count once. `report` follows each shard read. Raises TrainingError for a size
    that cannot be, for a damaged shard, for one of another tokenizer, and where there is nothing to count.
    """
    unknown = np.array(tokenizer.undecodable_ids(tokenizer.vocab_size), dtype=np.int64)
    special = np.array(sorted(i for i in tokenizer.added_ids | tokenizer.eos_ids if i < tokenizer.vocab_size))
    vocabulary = tokenizer.vocab_size - len(unknown)
    if not len(special) <= size <= vocabulary:
        raise TrainingError(
            f"a hot vocabulary of {size} ids cannot be: this tokenizer has {len(special)} special tokens, "
            f"which are always in, and {vocabulary} tokens in all"
        )
    counts = np.zeros((2, tokenizer.vocab_size), dtype=np.int64)  # [train, held out]
    seen: set[str] = set()
    sources: set[str] = set()
    repeated = 0
    for done, shard in enumerate(shards, start=1):
        contents = read_shard(shard, tokenizer.fingerprint, tokenizer.vocab_size)
        arrays = contents.arrays
        sources.add(json.dumps(contents.fingerprints, sort_keys=True))
        fresh = np.zeros(len(arrays["doc_ids"]), dtype=np.bool_)
        for i, name in enumerate(arrays["doc_ids"].tolist()):
            fresh[i] = name not in seen
            seen.add(name)
        repeated += len(fresh) - int(fresh.sum())
        lengths = np.diff(arrays["doc_offsets"])
        own = (arrays["loss_mask"] == 1) & np.repeat(fresh, lengths)
        held_out = np.repeat(arrays["split"] == 1, lengths)
        for split, chosen in enumerate((own & ~held_out, own & held_out)):
            counts[split] += np.bincount(arrays["tokens"][chosen], minlength=tokenizer.vocab_size)
        report(done)
    train, _ = counts
    if not train.any():
        raise TrainingError(f"nothing to count: no own token in the train split of {len(seen)} documents")
    rank = train.copy()
    rank[special] = train.max() + 1
    rank[unknown] = -1
    ids = np.sort(np.argsort(-rank, kind="stable")[:size])
    coverage = [Coverage(covered=int(split[ids].sum()), tokens=int(split.sum())) for split in counts]
    header = Header(
        tokenizer=tokenizer.fingerprint,
        train=coverage[0],
        held_out=coverage[1],
        sources=[json.loads(source) for source in sorted(sources)],
    )
    hot = HotVocab(torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(train[ids]), header)
    filled = int((rank[ids] == 0).sum())
    return Built(hot, len(seen), repeated, int(np.count_nonzero(train)), filled)
