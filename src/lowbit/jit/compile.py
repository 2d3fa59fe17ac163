"""From LLVM IR to machine code in memory, through an object file that can be kept.

LLVM is loaded when something is compiled: programs that are kept on disk do without.

Code is compiled for the features of its instruction set and for no particular CPU, so that the
same kernel gives the same object on every machine, and forcing a lower set runs what a lesser
machine would run.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import llvmlite

from lowbit.isa.instruction_set import InstructionSet
from lowbit.jit import elf
from lowbit.registry.locks import Deferred, waited_for

if TYPE_CHECKING:
    import llvmlite.binding as llvm
    from llvmlite.binding import ffi
else:
    llvm, ffi = Deferred("llvmlite.binding"), Deferred("llvmlite.binding.ffi")

VERSION = f"llvmlite {llvmlite.__version__}"  # each is made for one version of LLVM

LOCK = threading.RLock()
"""Held while code is generated, compiled or loaded: by one thread at a time, and at no fork."""

waited_for(LOCK)  # a child would find LLVM as another thread left it, half way


@cache
def _initialize() -> None:
    # Not lowbit alone calls LLVM. In a compilation, too, its lock is taken after the one above.
    waited_for(getattr(ffi.lib, "_lock", nullcontext()))
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@cache
def _initialize_all() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


@cache
def _target_machine(isa: InstructionSet) -> llvm.TargetMachine:
    _initialize()
    if isa.is_foreign:
        _initialize_all()
        triple = f"{isa.architecture}-unknown-linux-gnu"
    else:
        triple = llvm.get_process_triple()
    cpu = "x86-64" if triple.startswith("x86_64") else "generic"
    # Tuning for a generic core would otherwise split 512-bit vectors in two. A core that knows no
    # prefetch for writing passes over it. VPDPWSSD is to stay one instruction, not become two.
    more = ["-prefer-256-bit"] * (isa.vector_bytes == 64)
    more += ["+prfchw", "+fast-dpwssd"] * (cpu == "x86-64")
    features = ",".join([f"+{name}" for name in isa.features] + more)
    target = llvm.Target.from_triple(triple)
    return target.create_target_machine(cpu=cpu, features=features, opt=2, reloc="pic", jit=True)


def optimized(ir_text: str, isa: InstructionSet) -> llvm.ModuleRef:
    """Parse, verify and optimize a module. The kernels unroll and vectorize themselves."""
    machine = _target_machine(isa)
    # A context of its own, since what one has met, it keeps.
    module = llvm.parse_assembly(ir_text, llvm.create_context())
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=1)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    passes = builder.getModulePassManager()
    passes.run(module, builder)
    if type(passes)._dispose is ffi.ObjectRef._dispose:
        # It does nothing, and hides what frees the passes (llvmlite 0.50: a megabyte a program).
        super(ffi.ObjectRef, passes)._dispose()
        passes.detach()
    return module


def object_code(ir_text: str, isa: InstructionSet) -> bytes:
    """The object file of a module, for Linux where the set is another architecture's.

    RuntimeError if this LLVM was built without that architecture.
    """
    return _target_machine(isa).emit_object(optimized(ir_text, isa))


def assembly(ir_text: str, isa: InstructionSet) -> str:
    """The assembly of a module, in the syntax that LLVM prefers (AT&T's on x86)."""
    return _target_machine(isa).emit_assembly(optimized(ir_text, isa))


_T = TypeVar("_T")


def immortal(thing: _T) -> _T:
    """`thing`, which stays for as long as the process lives, with all that it refers to.

    Python clears the globals of modules when it ends; machine code, and CPython itself, may still
    read what a global held."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing


@cache
def _linker() -> llvm.LLJIT:
    """What puts object files into memory: one for all, as making it takes longer than using it."""
    _initialize()
    return immortal(llvm.create_lljit_compiler(use_jit_link=True, suppress_errors=True))


_libraries = itertools.count()


class Loaded:
    """An object file in executable memory, for as long as the process lives: a thread of the pool
    may be in it when everything else has ended.

    RuntimeError for code of another architecture, ValueError if it lacks the function.
    """

    def __init__(self, code: bytes, name: str, isa: InstructionSet) -> None:
        if isa.is_foreign:
            raise RuntimeError(f"{name} cannot be loaded here: {isa.missing()}")
        if sys.byteorder != "little":
            raise RuntimeError("lowbit's kernels are written for little-endian machines")
        try:
            self.address = elf.ObjectFile(code).placed(name)
        except elf.Unknown:
            self.address = _linked(code, name)


def _linked(code: bytes, name: str) -> int:
    """The address of a function that LLVM puts into memory."""
    library = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
    try:  # in a library of its own: many functions have one name
        linked = library.export_symbol(name).link(_linker(), f"{name} {next(_libraries)}")
    except RuntimeError as error:
        raise ValueError(f"the object file holds no function {name!r}: {error}") from error
    return immortal(linked)[name]
