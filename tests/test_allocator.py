import os
import platform
import subprocess
import sys

import pytest

from vitlab import allocator
from vitlab.__main__ import main

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone gives large blocks back")

FAULTS = """
import ctypes, resource, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages, one fault for each 2 MiB (PR_SET_THP_DISABLE)
from vitlab.allocator import keep_freed_memory
kept = keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
counts = [faults() for _ in range(20)][-4:]  # after small objects have found their places
print(int(kept), sum(counts) * resource.getpagesize() // 2**20)
"""


def kept_and_mib_of_faults(code=FAULTS, **environment):
    variables = {name: value for name, value in os.environ.items() if "MALLOC" not in name and "TUNABLES" not in name}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=variables | {"OMP_NUM_THREADS": "1"} | environment,
        check=True,
    )
    kept, mib = map(int, done.stdout.split())
    return bool(kept), mib


def test_freed_memory_is_used_again_without_the_system():
    kept, mib = kept_and_mib_of_faults()
    assert kept
    assert mib <= 8, "of 256 MiB that were written"


@pytest.mark.parametrize(
    "environment", [{"MALLOC_MMAP_THRESHOLD_": "1048576"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1048576"}]
)
def test_what_the_environment_sets_is_obeyed(environment):
    kept, mib = kept_and_mib_of_faults(**environment)
    assert not kept
    assert mib >= 200, "of 256 MiB that were written"


def test_other_settings_of_the_allocator_do_not_hinder():
    kept, _ = kept_and_mib_of_faults(GLIBC_TUNABLES="glibc.malloc.hugetlb=1")
    assert kept


def test_a_command_keeps_freed_memory(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(allocator, "keep_freed_memory", lambda: calls.append(None))
    assert main(["models", "--json"]) == 0
    assert len(calls) == 1


def test_kept_memory_can_be_returned():
    code = FAULTS.replace("counts = ", "from vitlab.allocator import return_freed_memory\ncounts = ")
    code = code.replace("    torch.ones(2**24)", "    torch.ones(2**24)\n    return_freed_memory()")
    assert kept_and_mib_of_faults(code)[1] >= 200, "of 256 MiB that were written"


def test_a_c_library_without_such_settings_is_left_alone(monkeypatch):
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: object())
    assert allocator.keep_freed_memory() is False
