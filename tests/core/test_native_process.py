"""The compiled core as a guest of its process: threads, fork, Ctrl-C, memory."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import multihead as mh
from multihead.core import native

pytestmark = pytest.mark.skipif(native.core is None, reason="the compiled core is not built")


def inputs(seed, n=257):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, n, 24, generator=random) for _ in range(3)]


def run(program, *, timeout=120):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=timeout, check=False)


def test_many_python_threads_at_once():
    expected = [mh.attention(*inputs(seed), causal=True, impl="native") for seed in range(8)]

    def work(seed):
        torch.set_num_threads(1 + seed % 4)
        return [mh.attention(*inputs(seed), causal=True, impl="native") for _ in range(10)]

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(8) as pool:
            for seed, results in enumerate(pool.map(work, range(8))):
                assert all(torch.equal(result, expected[seed]) for result in results)
    finally:
        torch.set_num_threads(before)


def test_threads_are_changed_while_others_compute():
    expected = [mh.attention(*inputs(seed, n=701), impl="native") for seed in range(3)]
    done = threading.Event()

    def change():
        n = 0
        while not done.is_set():
            n += 1
            torch.set_num_threads(1 + n % 5)

    before = torch.get_num_threads()
    changer = threading.Thread(target=change)
    changer.start()
    try:
        with ThreadPoolExecutor(3) as pool:
            work = [pool.submit(mh.attention, *inputs(n % 3, n=701), impl="native") for n in range(30)]
            for n, result in enumerate(work):
                assert torch.equal(result.result(), expected[n % 3])
    finally:
        done.set()
        changer.join()
        torch.set_num_threads(before)


@pytest.mark.parametrize("n", [1, 300])
def test_more_threads_than_work_or_cores(n):
    query, key, value = inputs(0, n)
    expected = mh.attention(query, key, value, impl="native")
    before = torch.get_num_threads()
    try:
        for threads in (3, 33):
            torch.set_num_threads(threads)
            assert torch.equal(mh.attention(query, key, value, impl="native"), expected)
    finally:
        torch.set_num_threads(before)


def test_other_python_threads_run_meanwhile():
    ticks = []
    stop = threading.Event()

    def tick():
        while not stop.wait(0.001):
            ticks.append(None)

    thread = threading.Thread(target=tick)
    thread.start()
    x = torch.randn(1, 2, 4096, 64)
    before = len(ticks)
    mh.attention(x, x, x, impl="native")
    after = len(ticks)
    stop.set()
    thread.join()
    assert after > before


def test_a_forked_child_computes():
    done = run(
        "import os, torch, multihead as mh\n"
        "torch.set_num_threads(2)\n"
        "x = torch.randn(2, 4, 300, 32)\n"
        "expected = mh.attention(x, x, x, impl='native')\n"
        "child = os.fork()\n"
        "result = mh.attention(x, x, x, impl='native')\n"
        "torch.set_num_threads(1)\n"  # PyTorch's own operators hang in a child that forked after its threads ran
        "same = torch.equal(result, expected)\n"
        "if child == 0: os._exit(0 if same else 1)\n"
        "assert same and os.waitpid(child, 0)[1] == 0\n"
        "print('both')\n"
    )
    assert done.stdout == "both\n", done.stderr


def test_children_forked_while_other_threads_compute():
    """A fork may come while a team of threads is at work and a lock is held: the children have none of them."""
    done = run(
        "import os, threading, torch, multihead as mh\n"
        "torch.set_num_threads(2)\n"
        "x = torch.randn(2, 4, 600, 32)\n"
        "expected = mh.attention(x, x, x, impl='native')\n"
        "stop = threading.Event()\n"
        "def work():\n"
        "    while not stop.is_set(): mh.attention(x, x, x, impl='native')\n"
        "workers = [threading.Thread(target=work) for _ in range(2)]\n"
        "for worker in workers: worker.start()\n"
        "for _ in range(5):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        grandchild = os.fork()\n"
        "        same = memoryview(mh.attention(x, x, x, impl='native').numpy()) == memoryview(expected.numpy())\n"
        "        if grandchild: same = same and os.waitpid(grandchild, 0)[1] == 0\n"
        "        os._exit(0 if same else 1)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "stop.set()\n"
        "for worker in workers: worker.join()\n"
        "assert torch.equal(mh.attention(x, x, x, impl='native'), expected)\n"
        "print('all')\n"
    )
    assert done.stdout == "all\n", done.stderr


@pytest.mark.parametrize("threads", [1, 2])
def test_ctrl_c_stops_a_long_call(threads):
    done = run(
        "import os, signal, threading, time, torch, multihead as mh\n"
        f"torch.set_num_threads({threads})\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # in the background it may be ignored
        "y = torch.randn(1, 2, 300, 16)\n"
        "mh.attention(y, y, y, impl='native')\n"  # an import may swallow the signal: they are done now
        "x = torch.zeros(1, 1, 1, 64).expand(1, 4, 65536, 64)\n"  # minutes of work
        "threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "try:\n"
        "    mh.attention(x, x, x, impl='native')\n"
        "except KeyboardInterrupt:\n"
        "    print('stopped')\n"
        # The core is as good as new.
        "torch.testing.assert_close(mh.attention(y, y, y, impl='native'),\n"
        "                           torch.nn.functional.scaled_dot_product_attention(y, y, y))\n"
    )
    assert done.returncode == 0 and done.stdout == "stopped\n", done.stderr


def test_ctrl_c_stops_the_main_thread_only():
    done = run(
        "import os, signal, threading, torch, multihead as mh\n"
        "torch.set_num_threads(2)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "y = torch.randn(1, 2, 2048, 64)\n"
        "expected = mh.attention(y, y, y, impl='native')\n"
        "results = []\n"
        "stop = threading.Event()\n"
        "def work():\n"
        "    while not stop.is_set(): results.append(torch.equal(mh.attention(y, y, y, impl='native'), expected))\n"
        "other = threading.Thread(target=work)\n"
        "other.start()\n"
        "x = torch.zeros(1, 1, 1, 64).expand(1, 4, 65536, 64)\n"
        "threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "try:\n"
        "    mh.attention(x, x, x, impl='native')\n"
        "except KeyboardInterrupt:\n"
        "    stop.set()\n"
        "    other.join()\n"
        "    print('stopped', all(results) and len(results) > 0)\n"
    )
    assert done.returncode == 0 and done.stdout == "stopped True\n", done.stderr


def test_memory_grows_with_the_text_not_with_its_square():
    program = (
        "import resource, torch, multihead as mh\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "small = torch.randn(1, 1, 512, 16)\n"
        "mh.observe(small, small, small, impl='native')\n"
        "x = torch.randn(1, 1, {n}, 16)\n"
        "before = peak()\n"
        "mh.observe(x, x, x, causal=True, impl='native')\n"
        "print(peak() - before)\n"
    )
    # All weights of 16,384 keys are 1 GiB; inputs, output and statistics are 5 MiB.
    done = run(program.format(n=16384))
    assert int(done.stdout) < 32 * 1024, done.stderr


def test_a_request_for_more_memory_than_there_is_says_so():
    done = run(
        "import torch, multihead as mh\n"
        "x = torch.zeros(1, 1, 1, 1).expand(1, 1, 2**37, 64)\n"  # the packed keys would take 64 TiB
        "try:\n"
        "    mh.attention(x[:, :, :160], x, x, impl='native')\n"
        "except MemoryError as error:\n"
        "    print(error)\n"
    )
    assert done.stdout.startswith("attention: no memory for the work space"), done.stderr


def test_memory_that_the_system_refuses():
    """A limit that a small call fits in and a large one does not, and a small one after it again."""
    done = run(
        "import resource, torch, multihead as mh\n"
        "y = torch.randn(1, 2, 300, 64)\n"
        "torch.set_num_threads(2)\n"
        "expected = mh.attention(y, y, y, impl='native')\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, size + 2**28))\n"
        "x = torch.zeros(1, 1, 1, 1).expand(1, 1, 2**21, 64)\n"  # the packed keys and values take 1 GiB
        "for threads in (2, 1, 2):\n"
        "    torch.set_num_threads(threads)\n"
        "    try:\n"
        "        mh.attention(x[:, :, :160], x, x, impl='native')\n"
        "    except MemoryError as error:\n"
        "        print('no memory', bool(str(error)))\n"
        "    assert torch.equal(mh.attention(y, y, y, impl='native'), expected)\n"
    )
    assert done.returncode == 0 and done.stdout == "no memory True\n" * 3, done.stderr


def test_exit_while_a_daemon_thread_computes():
    done = run(
        "import threading, time, torch, multihead as mh\n"
        "x = torch.zeros(1, 1, 1, 64).expand(1, 4, 65536, 64)\n"  # minutes of work
        "threading.Thread(target=lambda: mh.attention(x, x, x, impl='native'), daemon=True).start()\n"
        "time.sleep(0.3)\n"
        "print('exit')\n"
    )
    assert done.returncode == 0 and done.stdout == "exit\n", done.stderr


def test_level_can_be_chosen_by_name():
    assert native.core.level() in native.core.levels().split()
    assert {"baseline", "neon"} & set(native.core.levels().split())
