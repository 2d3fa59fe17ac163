"""Threads for one call: `GOMP_parallel` for a process without an OpenMP runtime to share.

One call of compiled code starts the threads and waits for their end, so no Python exception, and no
Ctrl-C, can come between: a caller never gets its operands back while a thread still works on them.
Nothing is left behind that a fork, another caller or the end of the interpreter could meet. Threads
start each other, half of them each time. One that the system does not give is done without.
"""

from __future__ import annotations

from lowbit.isa import get
from lowbit.jit.cache import load
from lowbit.jit.compile import Loaded

_NAME = "lowbit_team"
# Bytes. What kernels need is far less; glibc keeps up to 40 MiB of stacks for the next threads.
_STACK = 1 << 20

# The last parameter is GOMP_parallel's, and not used. 128 bytes hold any system's pthread_attr_t.
_IR = f"""
declare i32 @pthread_attr_init(ptr)
declare i32 @pthread_attr_setstacksize(ptr, i64)
declare i32 @pthread_attr_destroy(ptr)
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_join(i64, ptr)

define void @{_NAME}(ptr %kernel, ptr %slots, i32 %threads, i32 %flags) {{
  %several = icmp ugt i32 %threads, 1
  br i1 %several, label %share, label %alone
alone:
  call void %kernel(ptr %slots)
  ret void
share:
  %task = alloca {{ ptr, ptr, i32 }}
  %thread = alloca i64
  %attributes = alloca [128 x i8], align 16
  %half = lshr i32 %threads, 1
  %slots_at = getelementptr {{ ptr, ptr, i32 }}, ptr %task, i32 0, i32 1
  %half_at = getelementptr {{ ptr, ptr, i32 }}, ptr %task, i32 0, i32 2
  store ptr %kernel, ptr %task
  store ptr %slots, ptr %slots_at
  store i32 %half, ptr %half_at
  call i32 @pthread_attr_init(ptr %attributes)
  call i32 @pthread_attr_setstacksize(ptr %attributes, i64 {_STACK})
  %failed = call i32 @pthread_create(ptr %thread, ptr %attributes, ptr @member, ptr %task)
  call i32 @pthread_attr_destroy(ptr %attributes)
  %rest = sub i32 %threads, %half
  call void @{_NAME}(ptr %kernel, ptr %slots, i32 %rest, i32 0)
  %started = icmp eq i32 %failed, 0
  br i1 %started, label %wait, label %done
wait:
  %handle = load i64, ptr %thread
  call i32 @pthread_join(i64 %handle, ptr null)
  br label %done
done:
  ret void
}}

define internal ptr @member(ptr %task) {{
  %slots_at = getelementptr {{ ptr, ptr, i32 }}, ptr %task, i32 0, i32 1
  %threads_at = getelementptr {{ ptr, ptr, i32 }}, ptr %task, i32 0, i32 2
  %kernel = load ptr, ptr %task
  %slots = load ptr, ptr %slots_at
  %threads = load i32, ptr %threads_at
  call void @{_NAME}(ptr %kernel, ptr %slots, i32 %threads, i32 0)
  ret ptr null
}}
"""


_kept: list[Loaded] = []  # code must outlive its calls; threads that race here load it twice


def address() -> int:
    """Of the function: void (kernel, its slots, number of threads, unused)."""
    if not _kept:
        _kept.append(load(_NAME, get("generic"), lambda: _IR))
    return _kept[0].address
