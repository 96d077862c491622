"""Loading a model to decode with: weights, tokenizer, probe, memory, drafters. Runs on the thread that will decode."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from backend.drafters.hot_vocab import HotVocab, hot_vocab_drafter
from backend.drafters.mtp import mtp_drafter
from backend.drafters.prediction import PredictionDrafter
from backend.drafters.protocol import Drafter
from backend.drafters.recursive import RecursiveDrafter
from backend.drafters.student import load_student, student_drafter
from backend.engine.build import build_string, describe_build
from backend.engine.cache import PAGE, DeltaNetSlots, pages_for
from backend.engine.draft_length import AutoDraftLength, DraftLength, FixedDraftLength
from backend.engine.loop import Loop
from backend.engine.memory import Memory, page_bytes
from backend.engine.prefix import PrefixCache
from backend.engine.probe import ProbeReport, probe, settle
from backend.engine.runner import Runner
from backend.engine.scheduler import Scheduler
from backend.engine.speculation import Speculation
from backend.free_memory import free_bytes
from backend.interface import BackendError, Fingerprints
from backend.models.config import ModelConfig
from backend.models.hub import resolve_model
from backend.models.weights import LoadedModel, load_model
from backend.ops.delta_replay import MAX_ROWS
from backend.text.defaults import SamplingDefaults
from backend.text.grammar import GrammarCompiler
from backend.text.tokenizer import ChatTokenizer

MOST_DRAFTS = MAX_ROWS - 1
GIB = 2**30
_WORTH_SHARING = 512  # hidden size
# Of the memory free after loading, where no budget was given: a GPU is nobody else's.
_FREE_SHARE, _FREE_SHARE_OF_GPU = 0.5, 0.85
_SNAPSHOT_SHARE = 0.25  # of the budget, for the prefix cache's states
CPU_MODEL, GPU_MODEL = "tiny", "Qwen/Qwen3.5-9B"


def default_model(device: str) -> str:
    """What to serve where nothing was asked for: the bundled model without a GPU, the 9B with one."""
    return GPU_MODEL if device != "cpu" and torch.cuda.is_available() else CPU_MODEL


@dataclass(frozen=True)
class LocalOptions:
    """How to load and decode. `device` and `dtype` may be "auto"; `threads` None leaves it to the model's size."""

    model: str = "tiny"
    device: str = "auto"  # auto | cpu | cuda[:N]
    dtype: str = "auto"  # auto | bfloat16 | float32
    drafter: str = "mtp"  # mtp | none | prediction | hot_vocab:FILE | student:DIR
    further_drafters: tuple[str, ...] = ()  # loaded beside it, to be promoted or named by requests
    draft_tokens: int | Literal["auto"] = 2  # 0 … 8
    threads: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 16
    kv_memory: float | None = None  # GiB for pages, recurrent states and snapshots; None: from what is free
    prefix_cache: bool = True
    drafter_dir: str | None = None  # students may be loaded from it while serving
    name: str | None = None

    @property
    def drafters(self) -> tuple[str, ...]:
        """Of all drafters, the kind and, after a colon, where it is; the default first, "none" left out."""
        return tuple(name for name in (self.drafter, *self.further_drafters) if name != "none")


@dataclass(frozen=True)
class Loaded:
    """A model ready to decode, and the facts about it."""

    loop: Loop
    drafters: dict[str, Drafter]  # by name, the default first
    default: Drafter | None  # of the options
    tokenizer: ChatTokenizer
    grammars: GrammarCompiler
    config: ModelConfig
    defaults: SamplingDefaults
    fingerprints: Fingerprints
    build: dict[str, object]
    probe: ProbeReport

    @property
    def runner(self) -> Runner:
        return self.loop.speculation.runner

    @property
    def vocab(self) -> int:
        """Ids that may be chosen: the head's rows past the tokenizer's are padding."""
        return min(self.config.vocab_size, self.tokenizer.vocab_size)


def load(options: LocalOptions) -> Loaded:
    """Weights, tokenizer, probe, memory and drafters, on the calling thread. Raises BackendError in one line."""
    device = device_of(options.device)
    dtype = _dtype(options.dtype)
    directory = resolve_model(options.model)
    torch.set_num_threads(options.threads or _default_threads(ModelConfig.from_directory(directory)))
    tokenizer = ChatTokenizer.load(directory)
    kinds = [name.partition(":")[0] for name in options.drafters]
    with_mtp = "mtp" in kinds or "hot_vocab" in kinds
    loaded = load_model(directory, device, dtype, with_mtp=with_mtp)
    runner = Runner(loaded.model)
    drafters = _drafters(options, loaded, tokenizer)
    with torch.inference_mode():
        report = probe(runner)
        memory, snapshots = _memory(runner, options, drafters.values())
        for drafter in drafters.values():
            if isinstance(drafter, RecursiveDrafter):
                for module in drafter.draft_block.own:
                    settle(module, report.tiles)
            drafter.attach(memory)
    default = next(iter(drafters.values())) if options.drafter != "none" else None
    build = describe_build(runner, report)
    fingerprints = Fingerprints(
        weights=loaded.weights,
        tokenizer=tokenizer.fingerprint,
        chat_template=tokenizer.template_fingerprint,
        drafter=default.fingerprint if default else "none",
        build=build_string(build),
    )
    prefix = PrefixCache(memory, snapshots) if options.prefix_cache else None
    loop = Loop(Speculation(runner, memory, _lengths(options)), Scheduler(memory, options.max_num_seqs, prefix))
    return Loaded(
        loop=loop,
        drafters=drafters,
        default=default,
        tokenizer=tokenizer,
        grammars=GrammarCompiler(tokenizer),
        config=loaded.config,
        defaults=SamplingDefaults.load(directory),
        fingerprints=fingerprints,
        build=build,
        probe=report,
    )


def _lengths(options: LocalOptions) -> DraftLength:
    if not options.drafters and options.drafter_dir is None:
        return FixedDraftLength(0)
    if options.draft_tokens == "auto":
        return AutoDraftLength(MOST_DRAFTS)
    return FixedDraftLength(options.draft_tokens)


def _drafters(options: LocalOptions, loaded: LoadedModel, tokenizer: ChatTokenizer) -> dict[str, Drafter]:
    """By name, the default first."""
    drafters: dict[str, Drafter] = {}
    for given in options.drafters:
        drafter = _drafter(given, loaded, tokenizer)
        if drafter.name in drafters:
            raise BackendError(f"two drafters are named {drafter.name!r}, the second of them {given}")
        drafters[drafter.name] = drafter
    return drafters


def _drafter(given: str, loaded: LoadedModel, tokenizer: ChatTokenizer) -> Drafter:
    kind, _, path = given.partition(":")
    if kind == "mtp":
        return mtp_drafter(loaded.model, loaded.drafter)
    if kind == "prediction":
        return PredictionDrafter()
    if kind == "student":
        student = load_student(Path(path).expanduser(), loaded.model, loaded.weights, tokenizer.fingerprint)
        return student_drafter(loaded.model, student)
    hot = HotVocab.load(Path(path), tokenizer.fingerprint, loaded.config.vocab_size)
    return hot_vocab_drafter(loaded.model, loaded.drafter, hot)


def _memory(runner: Runner, options: LocalOptions, drafters: Iterable[Drafter]) -> tuple[Memory, int]:
    """The sequences' memory, and the bytes that snapshots of recurrent states may take.

    No more than the longest sequences could use together is taken, twice over for what the prefix cache keeps.
    """
    config, slots = runner.model.config, options.max_num_seqs
    longest = min(options.max_model_len or config.max_position_embeddings, config.max_position_embeddings)
    state = DeltaNetSlots(config, 1, runner.device, runner.dtype).slot_bytes
    # Drafters of one block share its keys and values.
    blocks = {one.block: one.draft_block for one in drafters if isinstance(one, RecursiveDrafter)}
    page = page_bytes(config, runner.dtype, [(block.kv_heads, block.head_dim) for block in blocks.values()])
    budget = _share_of_free(runner.device) if options.kv_memory is None else int(options.kv_memory * GIB)
    left = budget - state * slots
    snapshots = int(left * _SNAPSHOT_SHARE) if options.prefix_cache else 0
    pages = min((left - snapshots) // page, 2 * slots * pages_for(longest + MAX_ROWS))
    if pages < 1:
        given = "free memory" if options.kv_memory is None else "--kv-memory"
        raise BackendError(
            f"{budget / GIB:.2f} GiB of {given} do not hold {slots} recurrent states of {state / GIB:.3f} GiB and a "
            f"page of {PAGE} tokens ({page / GIB:.3f} GiB): fewer --max-num-seqs or more --kv-memory are needed"
        )
    return Memory(config, pages, slots, runner.device, runner.dtype), snapshots


def _share_of_free(device: torch.device) -> int:
    free = free_bytes(device)
    if free is None:
        raise BackendError("this system does not tell how much memory is free: --kv-memory says how many GiB to take")
    return int(free * (_FREE_SHARE_OF_GPU if device.type == "cuda" else _FREE_SHARE))


def _default_threads(config: ModelConfig) -> int:
    """One for models whose products are too small to share: there the threads' waiting costs more than they save."""
    return 1 if config.hidden_size < _WORTH_SHARING else torch.get_num_threads()


def device_of(name: str) -> torch.device:
    """auto, cpu, cuda or cuda:N. Raises BackendError for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:(0|[1-9]\d?))?", name):
        raise BackendError(f"unknown device {name!r}: expected auto, cpu, cuda or cuda:N")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise BackendError(f"device {name!r} asked for, but torch sees no CUDA device")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= (seen := torch.cuda.device_count()):
        raise BackendError(f"device {name!r} asked for, but torch sees {seen}, counted from 0")
    return device


def _dtype(name: str) -> torch.dtype:
    known = {"bfloat16": torch.bfloat16, "float32": torch.float32, "auto": torch.bfloat16}
    if name not in known:
        raise BackendError(f"unknown dtype {name!r}: expected auto, bfloat16 or float32")
    return known[name]
