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
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import llvmlite

from lowbit.isa import host
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


@dataclass(frozen=True)
class Target:
    """All that decides which object LLVM makes of a text: its repr is part of the cache's keys."""

    version: str  # of LLVM, by llvmlite's
    platform: str  # Python's name of the system
    triple: str  # LLVM's name of a foreign machine, "" for that of this process
    cpu: str
    features: str  # what the instruction set has, and how LLVM is to tune
    optimization: int  # of code generation
    passes: int  # the level of the pipeline before it
    relocation: str = "pic"
    vectorize: bool = False  # kernels unroll and vectorize themselves

    def machine(self) -> llvm.TargetMachine:
        """LLVM's object for it, after `_initialize` or `_initialize_all`."""
        triple = self.triple or llvm.get_process_triple()
        return llvm.Target.from_triple(triple).create_target_machine(
            cpu=self.cpu,
            features=self.features,
            opt=self.optimization,
            reloc=self.relocation,
            jit=True,
        )

    def pipeline(self) -> llvm.PipelineTuningOptions:
        """Which passes run on a text."""
        options = llvm.create_pipeline_tuning_options(speed_level=self.passes)
        options.loop_vectorization = self.vectorize
        options.slp_vectorization = self.vectorize
        options.loop_unrolling = self.vectorize
        return options


@cache
def target(isa: InstructionSet) -> Target:
    """What code for an instruction set is compiled for. It says so without loading LLVM."""
    architecture = isa.architecture or host.architecture()
    is_x86 = architecture == "x86_64"
    tuning = []
    if isa.vector_bytes == 64:
        # Tuning for a generic core would split 512-bit vectors in two.
        tuning.append("-prefer-256-bit")
    if is_x86:
        # A core that knows no prefetch for writing passes over it. VPDPWSSD is to stay one
        # instruction, not become two.
        tuning += ["+prfchw", "+fast-dpwssd"]
    return Target(
        version=VERSION,
        platform=sys.platform,
        triple=f"{architecture}-unknown-linux-gnu" if isa.is_foreign else "",
        cpu="x86-64" if is_x86 else "generic",
        features=",".join([*(f"+{name}" for name in isa.features), *tuning]),
        optimization=2,
        passes=1,
    )


@cache
def _target_machine(isa: InstructionSet) -> llvm.TargetMachine:
    _initialize()
    if isa.is_foreign:
        _initialize_all()
    return target(isa).machine()


def optimized(ir_text: str, isa: InstructionSet) -> llvm.ModuleRef:
    """Parse, verify and optimize a module."""
    machine = _target_machine(isa)
    # A context of its own, since what one has met, it keeps.
    module = llvm.parse_assembly(ir_text, llvm.create_context())
    module.verify()
    builder = llvm.create_pass_builder(machine, target(isa).pipeline())
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
