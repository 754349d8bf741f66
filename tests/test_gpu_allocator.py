"""Under an allocator that does not know ``record_stream``, as RMM's may not."""

import pytest
from loaders import script

# A stream-ordered pool: what is freed is overwritten on the stream it was allocated for, and given out again at once.
# A batch that goes back to the copy stream while the consumer's kernels are still to read it turns into rubbish.
POOL = """
    import collections, ctypes, warnings, torch
    from torch.utils.data import DataLoader
    from gpuprefetch import PrefetchIterator, _environment

    driver = ctypes.CDLL(_environment.driver_library())
    free_blocks = collections.defaultdict(list)

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    def allocate(size, device, stream):
        if free_blocks[size, stream]:
            return free_blocks[size, stream].pop()
        block = ctypes.c_uint64()
        assert driver.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(size)) == 0
        return block.value

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    def free(block, size, device, stream):
        driver.cuMemsetD8Async(ctypes.c_uint64(block), 0xEE, ctypes.c_size_t(size), ctypes.c_void_p(stream))
        free_blocks[size, stream].append(block)

    address = lambda function: ctypes.cast(function, ctypes.c_void_p).value
    allocator = torch._C._cuda_customAllocator(address(allocate), address(free))
    torch.cuda.memory.change_current_allocator(torch.cuda.memory._CUDAAllocator(allocator))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("num_threads", [0, 1])
def test_batches_are_the_consumers_own(num_threads):
    code, out, err = script(
        POOL
        + f"""
    n = 24
    low, high = torch.empty(n, device="cuda"), torch.empty(n, device="cuda")
    loader = DataLoader([torch.full((1 << 18,), float(i)) for i in range(n)], batch_size=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i, x in enumerate(PrefetchIterator(loader, "cuda", num_threads={num_threads})):
            torch.cuda._sleep(10_000_000)
            low[i], high[i] = x.amin(), x.amax()
            del x
    torch.cuda.synchronize()
    assert low.tolist() == high.tolist() == [float(i) for i in range(n)], (low.tolist(), high.tolist())
    assert sum("pluggable" in str(w.message) for w in caught) == 1
    print("right", flush=True)
    import os
    os._exit(0)  # torch frees what it cached through functions that the interpreter takes down before
    """
    )
    assert out.strip() == "right", (code, err)


@pytest.mark.gpu
@pytest.mark.parametrize("num_threads", [0, 1])
def test_small_tensors_are_the_consumers_own(num_threads):
    code, out, err = script(
        POOL
        + f"""
    n = 40
    low, high = torch.empty(n, device="cuda"), torch.empty(n, device="cuda")
    loader = [[torch.full((500,), float(i)) for _ in range(10)] for i in range(n)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        epoch = iter(PrefetchIterator(loader, "cuda", num_threads={num_threads}))
        for i in range(n):
            x = next(epoch)[i % 10]
            torch.cuda._sleep(10_000_000)
            low[i], high[i] = x.amin(), x.amax()
            del x
    torch.cuda.synchronize()
    assert low.tolist() == high.tolist() == [float(i) for i in range(n)], (low.tolist(), high.tolist())
    print("right", flush=True)
    import os
    os._exit(0)  # torch frees what it cached through functions that the interpreter takes down before
    """
    )
    assert out.strip() == "right", (code, err)
