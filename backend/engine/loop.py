"""One turn of the engine: end what was cancelled → admit → one prompt chunk at most → one verify step of the batch.

Runs on whatever thread calls it: the engine's, or that of whoever decodes without a server.
"""

from __future__ import annotations

import torch

from backend.engine.scheduler import Scheduler
from backend.engine.sequence import Sequence
from backend.engine.speculation import Speculation, fail


class Loop:
    """Call under `torch.inference_mode()`. A sequence that has ended leaves the scheduler in the same turn."""

    def __init__(self, speculation: Speculation, scheduler: Scheduler) -> None:
        self.speculation, self.scheduler = speculation, scheduler

    def renew(self) -> None:
        """Begin anew, with nothing running, waiting or remembered: after a turn that broke, no account can be trusted.

        The weights and the memory's tensors stay; nothing reads of a page what it has not written (law L1).
        """
        speculation = self.speculation
        speculation.memory.renew()
        self.scheduler = self.scheduler.renewed()
        self.speculation = Speculation(speculation.runner, speculation.memory, speculation.lengths, speculation.watch)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue it behind those that wait."""
        self.scheduler.waiting.append(sequence)

    def finish(self) -> None:
        """Turn until nothing is left to do."""
        while self.busy:
            self.turn()

    def turn(self) -> None:
        scheduler = self.scheduler
        for sequence in [s for s in (*scheduler.running, *scheduler.waiting) if s.cancelled]:
            sequence.end("cancelled")
            scheduler.leave(sequence)
        scheduler.admit()
        prompt = scheduler.prompt
        if prompt:
            self._prefill(prompt)
        scheduler.reserve()
        if scheduler.decoding:
            self._step(list(scheduler.decoding), alone=prompt is None)

    def _prefill(self, sequence: Sequence) -> None:
        try:
            self.speculation.prefill(sequence, self.scheduler.chunk(sequence))
        except torch.AcceleratorError:
            raise  # the device is lost to everybody
        except Exception as error:
            fail(sequence, error)
        if sequence.finish:
            self.scheduler.leave(sequence)
        else:
            self.scheduler.after_chunk(sequence)

    def _step(self, batch: list[Sequence], alone: bool) -> None:
        try:
            self.speculation.step(batch, alone)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            # Nobody can tell whose rows it was; who joins later has other rows.
            for sequence in batch:
                if not sequence.finish:
                    fail(sequence, error)
        for sequence in batch:
            if sequence.finish:
                self.scheduler.leave(sequence)
