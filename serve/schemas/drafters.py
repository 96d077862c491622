"""What an operator says of drafters, and what is told of them. Knows the wire alone: not which drafters there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from serve.strict import RequestModel

Text = Annotated[str, Field(min_length=1, max_length=4096)]


class LoadDrafterRequest(RequestModel):
    """`path`: a student's directory inside --drafter-dir. `name`: what to call it, in the place of its own name.
    `min_acceptance`: of its first draft tokens on the built-in prompts, below which it is refused."""

    path: Text
    name: Text | None = None
    min_acceptance: float = Field(0.1, ge=0, le=1)


class PromoteRequest(RequestModel):
    """`drafter`: a loaded one's name, or none. `canary`: only this share of the requests gets it, by their ids."""

    drafter: str
    canary: float | None = Field(None, gt=0, le=1)


class Acceptance(BaseModel):
    """Counts since it was loaded (DESIGN §6): verify steps that drafted, and of each slot P_s and A_s."""

    drafts: int
    draft_tokens_per_pos: list[int]
    accepted_tokens_per_pos: list[int]


class Steps(BaseModel):
    """Verify steps in which it alone drafted and nothing else ran, of batches rounded up to a power of two.

    `sequences` and `accepted` are sums over the steps: τ = 1 + accepted / sequences. `seconds`: of draft and verify.
    """

    batch: int
    steps: int
    sequences: int
    accepted: int
    seconds: float


class LoadedDrafter(BaseModel):
    """`loaded_at`: Unix time. `parameters_read`: weights per draft step. `evaluation`: as its checkpoint tells it."""

    name: str
    kind: Literal["mtp", "hot_vocab", "prediction", "student", "none"]
    fingerprint: str
    state: Literal["active", "previous", "canary", "loaded", "retiring"]
    loaded_at: float | None
    parameters_read: int
    evaluation: Mapping[str, Any] | None
    acceptance: Acceptance
    steps: list[Steps]


class Tried(BaseModel):
    """How one drafter drafted the greedy answers to the built-in prompts; `acceptance`: of its first slot."""

    drafter: str
    steps: int
    drafts: int
    draft_tokens_per_pos: list[int]
    accepted_tokens_per_pos: list[int]
    acceptance: float
    acceptance_length: float


class Trial(BaseModel):
    """The new drafter's and, beside them, the active one's."""

    prompts: int
    min_acceptance: float
    candidate: Tried
    active: Tried


class NewDrafter(LoadedDrafter):
    trial: Trial


class Canary(BaseModel):
    drafter: str
    share: float


class DefaultOf(BaseModel):
    """A default drafter, and the Unix time from which on it was one."""

    drafter: str
    since: float


class Drafters(BaseModel):
    """`previous`: what a roll back makes active. `history`: the defaults, oldest first, the last in force."""

    active: str
    previous: str | None
    canary: Canary | None
    drafters: list[LoadedDrafter]
    history: list[DefaultOf]
