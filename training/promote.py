"""A trained drafter to a running server: loaded beside the others, tried on few, then alone, kept only if it pays.

Decides by `gate` what `live_drafters` and `traffic` tell. By law L2 no client can notice; that is checked as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from backend.drafters.student import read_header
from capture.records import CaptureError, utc_now
from capture.server import RefusedError, Server, Version
from capture.store import Store, default_path
from training.errors import TrainingError
from training.gate import Block, Bucket, Counts, Ratio, added, buckets, paired, since, tau, throughput, unpaired
from training.live_drafters import Buckets, Operator
from training.traffic import Ask, Served, Traffic, captured_since, drive, held_out_asks

Report = Callable[[str, int, int], None]

LONGEST_NAME = 64
EVERYBODY = 1.0  # a canary's share: as active as a default, and nothing is forgotten when it ends


@dataclass(frozen=True)
class PromoteOptions:
    """`drafter`: the checkpoint's directory; `server_path`: where the server finds it, unless there. `name`: what the
    server is to call it. `requests`: held-out captured ones, at most, to try it on. `canary`: share of requests on
    trial; `wait`: seconds that the trial leaves to the server's own clients too. `pairs`: of blocks. `min_gain`: what
    both ratios must exceed with their intervals, 1 for any gain at all."""

    server: str
    drafter: Path
    server_path: str | None = None
    name: str | None = None
    capture: Path | None = None
    api_key: str | None = field(default=None, metadata={"secret": True})
    admin_key: str | None = field(default=None, metadata={"secret": True})
    requests: int = 64
    fewest_requests: int = 8
    concurrency: int = 1
    canary: float = 0.5
    wait: float = 0.0
    pairs: int = 6
    min_gain: float = 1.0
    min_acceptance: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Trial:
    """What the canary told: requests and τ of each, and the ratio where there were steps enough."""

    candidate_requests: int
    incumbent_requests: int
    candidate_tau: float
    incumbent_tau: float
    ratio: Ratio | None


@dataclass(frozen=True)
class Verdict:
    """`steps`: τ / (t_verify + t_draft); `throughput`: tokens/s of whole blocks; both candidate over incumbent. None
    where it did not come so far."""

    promoted: bool
    reason: str
    candidate: str
    incumbent: str
    requests: int = 0
    tokens_served: int = 0  # in blocks
    trial: Trial | None = None
    steps: Ratio | None = None
    throughput: Ratio | None = None
    candidate_tau: float | None = None
    incumbent_tau: float | None = None
    buckets: tuple[Bucket, ...] = ()
    blocks: tuple[tuple[float, float], ...] = ()  # tokens/s of candidate and incumbent
    parameters_read: Mapping[str, int | None] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class _No(Exception):
    """The candidate is not to be promoted; `found` is what the verdict tells besides."""

    def __init__(self, reason: str, **found: Any) -> None:
        super().__init__(reason)
        self.found = found


def promote(options: PromoteOptions, report: Report = lambda doing, done, total: None) -> Verdict:
    """Promote the candidate if it serves faster, else leave the server as it was.

    Whatever ends this early, an interruption too, makes the incumbent the default again. Raises TrainingError where
    there is too little to try it on or the server calls another drafter so, BackendError where there is no checkpoint,
    and ServerError where the server cannot be asked.
    """
    name, fingerprint = options.name or candidate_name(options.drafter), read_header(options.drafter).fingerprint
    with ExitStack() as stack:
        clients = stack.enter_context(Server(options.server, options.api_key))
        operator = Operator(stack.enter_context(Server(options.server, options.admin_key or options.api_key)))
        store = stack.enter_context(Store.open(options.capture or default_path()))
        version = clients.version()
        asks = held_out_asks(store, version, options.requests)
        if len(asks) < options.fewest_requests:
            raise TrainingError(
                f"{store.path} holds {len(asks)} different held-out requests of this server's model; "
                f"trying a drafter takes {options.fewest_requests} (about a tenth of all rows is held out)"
            )
        before = operator.drafters()
        if name in before.loaded and before.loaded[name].fingerprint != fingerprint:
            raise TrainingError(f"the server has another drafter {name} than {options.drafter}: give this one a --name")
        incumbent = before.active
        if name == before.active:  # left so by a promotion that was killed between two blocks, or never needed
            if before.previous is None:
                return Verdict(True, f"{name} is the default already", name, name)
            incumbent = before.previous
        if name not in before.loaded:
            report("loading", 0, 1)
            path = options.server_path or str(options.drafter.resolve())
            try:
                operator.load(path, name, options.min_acceptance)
            except RefusedError as error:
                return Verdict(False, f"the server refuses it: {error}", name, incumbent)
        with _Restored(operator, incumbent, name) as restored:
            run = _Run(options, clients, operator, store, version, asks, name, incumbent, report)
            try:
                if operator.drafters().loaded[name].fingerprint != fingerprint:
                    raise _No(f"what the server finds at its path is another checkpoint than {options.drafter}")
                verdict = run.verdict()
                run.activate(name)
            except _No as no:
                return Verdict(False, str(no), name, incumbent, len(asks), **no.found)
            restored.keep = True
            return verdict


class _Restored:
    """The incumbent as default again and the candidate gone, unless it is to be kept; another's default stays."""

    def __init__(self, operator: Operator, incumbent: str, candidate: str) -> None:
        self.keep = False
        self._operator, self._incumbent, self._candidate = operator, incumbent, candidate

    def __enter__(self) -> _Restored:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: object) -> None:
        if self.keep:
            return
        try:
            now = self._operator.drafters()
            if now.active in (self._incumbent, self._candidate):
                self._operator.activate(self._incumbent)
            elif now.canary == self._candidate:
                self._operator.activate(now.active)
            left = self._operator.drafters().loaded.get(self._candidate)
            if left and left.state != "retiring":  # the server may have let it go by itself
                self._operator.unload(self._candidate)
        except CaptureError as second:
            first = f"{error or type(error).__name__}; and " if error else ""
            raise TrainingError(f"{first}{self._incumbent} could not be made the default again: {second}") from error


@dataclass(frozen=True)
class _Run:
    """One candidate's trial and blocks."""

    options: PromoteOptions
    clients: Server
    operator: Operator
    store: Store
    version: Version
    asks: Sequence[Ask]
    candidate: str
    incumbent: str
    report: Report

    def verdict(self) -> Verdict:
        """Raises _No where one of the figures speaks against it."""
        trial, answers = self._trial()
        blocks, traffic = self._blocks(trial, answers)
        counts = {name: _counts(served) for name, served in traffic.items()}
        ours, theirs = counts[self.candidate], counts[self.incumbent]
        parts = (added([b.candidate_steps for b in blocks]), added([b.incumbent_steps for b in blocks]))
        found: dict[str, Any] = {
            "trial": trial,
            "tokens_served": sum(one.tokens for served in traffic.values() for one in served),
            "throughput": throughput(blocks, self.options.seed),
            "candidate_tau": tau(list(ours.values())),
            "incumbent_tau": tau(list(theirs.values())),
            "buckets": tuple(buckets(*parts)),
            "blocks": tuple((block.candidate, block.incumbent) for block in blocks),
            "parameters_read": {
                name: one.parameters_read
                for name, one in self.operator.drafters().loaded.items()
                if name in (self.candidate, self.incumbent)
            },
        }
        try:
            found["steps"] = paired(ours, theirs, blocks, self.options.seed)
        except ValueError as error:
            raise _No(f"its steps cannot be compared: {error}", **found) from None
        gain = self.options.min_gain
        for what, ratio in (("by steps", found["steps"]), ("in tokens/s", found["throughput"])):
            if not ratio.low > gain:
                raise _No(f"not surely faster {what}: {ratio} over {self.incumbent}; above {gain:g} is wanted", **found)
        what = "faster" if gain >= 1 else f"surely above {gain:g}"
        reason = f"{what}: {found['steps']} by steps, {found['throughput']} in tokens/s"
        return Verdict(True, reason, self.candidate, self.incumbent, len(self.asks), **found)

    def _trial(self) -> tuple[Trial, dict[str, str]]:
        """A share of the requests on the candidate. Also the answers' digests, by request."""
        began, start = utc_now(), self._steps()
        if self.operator.drafters().active == self.candidate:
            self.activate(self.incumbent)
        self.activate(self.candidate, self.options.canary)
        traffic = self._drive("canary", self.asks)
        served = list(traffic.served)
        if self.options.wait:
            self._wait(self.options.wait)
            served += captured_since(self.store, began, self.version)
        now = self._steps()
        ours, theirs = (
            [Counts(one.steps, one.accepted) for one in served if one.drafter == name]
            for name in (self.candidate, self.incumbent)
        )
        spans = [since(now[name], start[name]) for name in (self.candidate, self.incumbent)]
        ratio = None
        found = buckets(*spans)
        if found and any(one.steps for one in ours) and any(one.steps for one in theirs):
            ratio = unpaired(ours, theirs, found, self.options.seed)
        trial = Trial(len(ours), len(theirs), tau(ours), tau(theirs), ratio)
        if any(one.steps for one in ours) and not any(one.accepted for one in ours):
            raise _No("no draft of it was accepted on trial; is the server's --draft-tokens 0?", trial=trial)
        if ratio is not None and ratio.high < self.options.min_gain:
            raise _No(f"slower on trial: {ratio} over {self.incumbent} by steps", trial=trial)
        return trial, {one.id: one.digest for one in traffic.served}

    def _blocks(self, trial: Trial, answers: Mapping[str, str]) -> tuple[list[Block], dict[str, list[Served]]]:
        """The same requests under one drafter alone, then the other; who begins alternates, so that whatever drifts
        meets both alike."""
        blocks: list[Block] = []
        served: dict[str, list[Served]] = {self.candidate: [], self.incumbent: []}
        for pair in range(self.options.pairs):
            order = (self.candidate, self.incumbent) if pair % 2 == 0 else (self.incumbent, self.candidate)
            told: dict[str, tuple[Traffic, Buckets]] = {}
            for name in order:
                self.activate(name, EVERYBODY if name == self.candidate else None)
                before = self._steps()[name]
                traffic = self._drive(f"block {pair + 1} of {self.options.pairs}, {name}", self.asks)
                told[name] = traffic, since(self._steps()[name], before)
                for one in traffic.served:
                    if one.digest != answers[one.id]:
                        raise _No(f"the answer to {one.id} changed with the drafter: that must never be", trial=trial)
                    if one.drafter != name:
                        raise _No(f"{name} was to draft for everybody, but {one.drafter} did", trial=trial)
                served[name] += traffic.served
            (ours, our_steps), (theirs, their_steps) = told[self.candidate], told[self.incumbent]
            blocks.append(Block(ours.tokens_per_second, theirs.tokens_per_second, our_steps, their_steps))
        return blocks, served

    def activate(self, name: str, canary: float | None = None) -> None:
        """As the operator does; raises _No where somebody else has chosen a default meanwhile."""
        active = self.operator.drafters().active
        if active not in (self.incumbent, self.candidate):
            raise _No(f"{active} was made the default meanwhile, not by this promotion")
        self.operator.activate(name, canary)

    def _drive(self, doing: str, asks: Sequence[Ask]) -> Traffic:
        self.report(doing, 0, len(asks))
        return drive(self.clients, asks, self.options.concurrency, lambda done: self.report(doing, done, len(asks)))

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.report("clients on trial", int(seconds - left), int(seconds))
            time.sleep(min(left, 1.0))

    def _steps(self) -> dict[str, Buckets]:
        loaded = self.operator.drafters().loaded
        return {name: loaded[name].buckets if name in loaded else {} for name in (self.candidate, self.incumbent)}


def _counts(served: Sequence[Served]) -> dict[str, Counts]:
    """By request. Of one that was served several times the first: its answer is the same, and so are its drafts."""
    found: dict[str, Counts] = {}
    for one in served:
        found.setdefault(one.id, Counts(one.steps, one.accepted))
    return found


def candidate_name(drafter: Path) -> str:
    """The checkpoint's own name and the beginning of its weights' hash: another training is another name.

    Raises BackendError where there is no checkpoint.
    """
    header = read_header(drafter)
    own = header.name or drafter.resolve().name
    return own[: LONGEST_NAME - 9] + "-" + header.weights_sha256[:8]
