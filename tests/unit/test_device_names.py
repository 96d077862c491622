"""A device that is asked for and is not there is one clear line, whoever asks."""

from __future__ import annotations

import pytest
import torch

from backend.interface import BackendError
from backend.loading import device_of
from training.distillation.world import join


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.parametrize(
    "name", ["", "gpu", "meta", "mps", "cuda:", "cuda:-1", "cuda:x", "cuda:00", "cuda:1000", "cpu\n", "CPU"]
)
@pytest.mark.usefixtures("one_gpu")
def test_a_name_that_is_no_devices_is_refused(name: str) -> None:
    with pytest.raises(BackendError, match="expected auto, cpu, cuda or cuda:N"):
        device_of(name)


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:3"])
def test_without_a_gpu_none_is_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto") == device_of("cpu") == torch.device("cpu")
    with pytest.raises(BackendError, match="sees no CUDA device"):
        device_of(name)


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_too_many_is_refused() -> None:
    assert [device_of(name).index for name in ("cuda", "cuda:0")] == [None, 0]
    with pytest.raises(BackendError, match="'cuda:1' asked for, but torch sees 1"):
        device_of("cuda:1")


@pytest.mark.usefixtures("one_gpu")
def test_a_process_of_torchrun_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(BackendError, match="'cuda:1' asked for, but torch sees 1"), join("auto"):
        pass
