"""Memory of large tensors: it waits for the next of its size, is never shared, and can be given back."""

import gc
import mmap
import sys
import threading

import pytest
import torch

import rla
from rla.ops import memory

ROWS = memory.LARGE // 4096  # of 1024 float32: the smallest large tensor
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux's allocator is known to give large blocks back at once")


@pytest.fixture(autouse=True)
def nothing_waits():
    gc.collect()
    memory.release()
    yield
    memory.release()


@linux
def test_memory_waits_for_the_next_tensor_of_its_size():
    x = memory.empty((ROWS, 1024), torch.float32)
    address = x.data_ptr()
    assert memory.waiting() == 0
    assert x.shape == (ROWS, 1024)
    assert x.is_contiguous()
    x.fill_(1.0)
    part = x[3:5]
    del x
    assert memory.waiting() == 0  # a view keeps it
    assert part.sum() == 2048
    del part
    assert memory.waiting() == memory.LARGE
    assert memory.empty((1024, ROWS, 2), torch.bfloat16).data_ptr() == address


@linux
def test_tensors_that_live_at_once_have_memory_of_their_own():
    del (first := [memory.empty((ROWS, 1024), torch.float32) for _ in range(3)])[:]
    several = [memory.empty((ROWS, 1024), torch.float32).fill_(i) for i in range(4)]
    assert not first
    assert memory.waiting() == 0
    assert [x.min().item() == x.max().item() == i for i, x in enumerate(several)] == [True] * 4


@linux
def test_a_block_much_larger_than_asked_for_keeps_waiting():
    del (x := [memory.empty((2 * ROWS, 1024), torch.float32)])[:]
    y = memory.empty((ROWS, 1024), torch.float32)
    assert not x
    assert memory.waiting() == 2 * memory.LARGE
    assert y.numel() == ROWS * 1024


@linux
def test_those_that_have_waited_longest_are_given_back(monkeypatch):
    monkeypatch.setattr(memory, "_limit", lambda: 3 * memory.LARGE)
    first, second = (memory.empty((n * ROWS, 1024), torch.float32) for n in (1, 2))
    del first, second
    assert memory.waiting() == 3 * memory.LARGE
    del (third := [memory.empty((3 * ROWS, 1024), torch.float32)])[:]
    assert not third
    assert memory.waiting() == 3 * memory.LARGE
    assert len(memory._idle) == 1


@linux
def test_what_waits_is_offered_to_the_system_when_another_size_is_asked_for(monkeypatch):
    """Not at every call: to offer a block and to take it again costs as much as a fiftieth of a kernel."""
    offered = []
    monkeypatch.setattr(memory, "_advise", lambda block, what: offered.append(len(block)) if what == mmap.MADV_FREE else None)
    for _ in range(3):
        del (x := [memory.empty((ROWS, 1024), torch.float32)])[:]
        assert not x
        assert not offered
    for _ in range(2):  # once
        del (x := [memory.empty((4 * ROWS, 1024), torch.float32)])[:]
        assert offered == [memory.LARGE]
    del (x := [memory.empty((ROWS, 1024), torch.float32)])[:]  # taken and given, it is no longer the system's
    del (x := [memory.empty((16 * ROWS, 1024), torch.float32)])[:]
    assert not x
    assert offered == [memory.LARGE, 4 * memory.LARGE, memory.LARGE]


def test_small_tensors_are_torchs(monkeypatch):
    monkeypatch.setattr(memory, "_take", None)
    assert memory.empty((ROWS - 1, 1024), torch.float32).shape == (ROWS - 1, 1024)
    assert memory.empty((0,), torch.float32).numel() == 0


@linux
def test_threads_never_get_the_same_block():
    wrong = []

    def work(i: int) -> None:
        for _ in range(20):
            x = memory.empty((ROWS, 1024), torch.float32)
            x[::64] = i
            if not (x[::64] == i).all():
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@linux
@pytest.mark.skipif(not rla.backends()["native"].usable, reason="native is not built")
def test_an_output_in_kept_memory_is_a_tensor_like_any_other():
    """The same values in memory that was used before, changed in place, and differentiated."""
    q, k, v = torch.randn(3, 1, ROWS // 2, 8, 256).unbind()
    expected, _ = rla.attend(q, k, v, method="sgla", backend="native")
    del (x := [rla.attend(k, q, v, method="sgla", backend="native")[0]])[:]
    assert not x
    assert memory.waiting()
    q.requires_grad_()
    out, _ = rla.attend(q, k, v, method="sgla", backend="native")
    assert torch.equal(out, expected)
    out.mul_(2)
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert grad.isfinite().all()
    assert grad.abs().sum() > 0
