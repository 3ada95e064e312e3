"""Kernels for CPUs: attention over pages and products with weights, as LLVM code that XLA calls.

Without llvmlite, or on another CPU than x86 with AVX2, XLA computes everything (`attention.py` has its formulation).
`native.py` compiles, registers and calls a kernel; `code.py` says what a kernel is; `machine.py` says how many processors and
how much memory a process may use. Three things connect the kernels with software that is not ours:

* XLA calls a kernel through its typed foreign function interface, version 0.1, with a pointer to a call frame. `code.py` and
  `threads.py`, and no other files, have the offsets of `xla/ffi/api/c_api.h`: of the frame 8 (extension), 72 (operands) and 112
  (results); of a buffer 24 (data) and 40 (dimensions); of an extension 8 (its type) and 24 (metadata).
* Threads of Linux compute a call's items beside XLA's own (`threads.py`): one fewer than the process has cores, started at the
  first compilation, asleep when no call comes. Their pool is a block of memory that machine code and Python lay out alike.
* Machine code is kept on disk beside JAX's executables, named after a digest of this folder's sources, of the CPU's features
  and of the versions of LLVM and llvmlite.

Knows arrays and `pallas/layouts` only.
"""
