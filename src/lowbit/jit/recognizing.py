"""The machine code behind jit.recognize, and the layout of what it reads."""

from __future__ import annotations

import time

from lowbit.jit import threads
from lowbit.jit.entry import BYTES_AT, HEADER, TUPLE_AT

NAME = "lowbit_recognize"
FACTS, CHECK = 18, 10  # words of a record before the slots, and of a check
SAME, ARRAY, OUTPUT, REAL, INTEGER, COUNT, COPIED = range(7)
MOST_AXES = 2
WRITEABLE = 0x400  # NPY_ARRAY_WRITEABLE

_CLOCK, _STALL = time.CLOCK_MONOTONIC, int(threads.STALL * 1e9)  # nanoseconds

DATA, NDIM, DIMENSIONS, STRIDES = (HEADER + 8 * i for i in range(4))
DESCR, FLAGS = HEADER + 40, HEADER + 48
# Of a dtype: its type's number, its byte order, and two letters that follow from the number. A byte
# of flags between them does not count.
DTYPE, DTYPE_BITS = HEADER + 8, -1 << 32 | 0xFFFFFF
_EQUAL = 2  # Py_EQ

# What is read of objects and records.
READING = """
@_Py_NoneStruct = external global i8
declare void @Py_IncRef(ptr)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define private i64 @word(ptr %at, i64 %index) alwaysinline {
  %place = getelementptr i64, ptr %at, i64 %index
  %value = load i64, ptr %place
  ret i64 %value
}
define private i64 @member(ptr %object, i64 %offset) alwaysinline {
  %place = getelementptr i8, ptr %object, i64 %offset
  %value = load i64, ptr %place
  ret i64 %value
}
"""

# `self` is a tuple that begins with the record: facts, slots, pairs of a slot and its offset in the
# scratch, checks. An output's memory is compared with that of each array before it. The last
# facts: the GIL is kept; threads; where the address stands of what starts them; the scratch that
# calls share, a word that says whether it is taken and then its address, or 0 for the stack.
IR = f"""{READING}
declare i64 @PyLong_AsLongLongAndOverflow(ptr, ptr)
declare i32 @PyObject_RichCompareBool(ptr, ptr, i32)
declare void @PyErr_Clear()
declare ptr @PyObject_CallObject(ptr, ptr)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare double @llvm.fabs.f64(double)
declare i32 @clock_gettime(i32, ptr)

define private i1 @fits(ptr %value, ptr %check, i64 %array) {{
  %type = call i64 @member(ptr %value, i64 {HEADER - 8})
  %is_array = icmp eq i64 %type, %array
  br i1 %is_array, label %type_fits, label %no
type_fits:
  %descr_word = call i64 @member(ptr %value, i64 {DESCR})
  %descr = inttoptr i64 %descr_word to ptr
  %dtype_word = call i64 @member(ptr %descr, i64 {DTYPE})
  %dtype = and i64 %dtype_word, {DTYPE_BITS}
  %dtype_wanted = call i64 @word(ptr %check, i64 7)
  %same_dtype = icmp eq i64 %dtype, %dtype_wanted
  %ndim_at = getelementptr i8, ptr %value, i64 {NDIM}
  %ndim_half = load i32, ptr %ndim_at
  %ndim = sext i32 %ndim_half to i64
  %ndim_wanted = call i64 @word(ptr %check, i64 2)
  %same_ndim = icmp eq i64 %ndim, %ndim_wanted
  %flags_at = getelementptr i8, ptr %value, i64 {FLAGS}
  %flags = load i32, ptr %flags_at
  %writeable = and i32 %flags, {WRITEABLE}
  %may_be_written = icmp ne i32 %writeable, 0
  %kind = call i64 @word(ptr %check, i64 0)
  %is_input = icmp ne i64 %kind, {OUTPUT}
  %may = or i1 %may_be_written, %is_input
  %both = and i1 %same_dtype, %same_ndim
  %all = and i1 %both, %may
  br i1 %all, label %axes, label %no
axes:
  %dimensions_word = call i64 @member(ptr %value, i64 {DIMENSIONS})
  %strides_word = call i64 @member(ptr %value, i64 {STRIDES})
  %dimensions = inttoptr i64 %dimensions_word to ptr
  %strides = inttoptr i64 %strides_word to ptr
  br label %axis
axis:
  %i = phi i64 [ 0, %axes ], [ %next_i, %axis_fits ]
  %more = icmp slt i64 %i, %ndim
  br i1 %more, label %look, label %yes
look:
  %size = call i64 @word(ptr %dimensions, i64 %i)
  %size_index = add i64 %i, 3
  %size_wanted = call i64 @word(ptr %check, i64 %size_index)
  %same_size = icmp eq i64 %size, %size_wanted
  %stride = call i64 @word(ptr %strides, i64 %i)
  %stride_index = add i64 %i, {3 + MOST_AXES}
  %stride_wanted = call i64 @word(ptr %check, i64 %stride_index)
  %same_stride = icmp eq i64 %stride, %stride_wanted
  %same = and i1 %same_size, %same_stride
  br i1 %same, label %axis_fits, label %no
axis_fits:
  %next_i = add i64 %i, 1
  br label %axis
yes:
  ret i1 true
no:
  ret i1 false
}}
define private i1 @apart(ptr %output, ptr %check, ptr %value, ptr %other) {{
  %kind = call i64 @word(ptr %other, i64 0)
  %is_read = icmp eq i64 %kind, {ARRAY}
  %is_copied = icmp eq i64 %kind, {COPIED}
  %is_array = or i1 %is_read, %is_copied
  br i1 %is_array, label %compare, label %yes
compare:
  %a = call i64 @member(ptr %output, i64 {DATA})
  %a_low = call i64 @word(ptr %check, i64 8)
  %a_high = call i64 @word(ptr %check, i64 9)
  %b = call i64 @member(ptr %value, i64 {DATA})
  %b_low = call i64 @word(ptr %other, i64 8)
  %b_high = call i64 @word(ptr %other, i64 9)
  %a_begin = add i64 %a, %a_low
  %a_end = add i64 %a, %a_high
  %b_begin = add i64 %b, %b_low
  %b_end = add i64 %b, %b_high
  %before = icmp ule i64 %a_end, %b_begin
  %behind = icmp ule i64 %b_end, %a_begin
  %apart = or i1 %before, %behind
  ret i1 %apart
yes:
  ret i1 true
}}

define private i64 @nanoseconds() {{
  %time = alloca [2 x i64]
  %read = call i32 @clock_gettime(i32 {_CLOCK}, ptr %time)
  %seconds = call i64 @word(ptr %time, i64 0)
  %rest = call i64 @word(ptr %time, i64 1)
  %whole = mul i64 %seconds, 1000000000
  %sum = add i64 %whole, %rest
  ret i64 %sum
}}

define ptr @{NAME}(ptr %self, ptr %args, i64 %given) {{
entry:
  %bytes_word = call i64 @member(ptr %self, i64 {TUPLE_AT})
  %bytes = inttoptr i64 %bytes_word to ptr
  %record = getelementptr i8, ptr %bytes, i64 {BYTES_AT}
  %words = call i64 @word(ptr %record, i64 1)
  %count = call i64 @word(ptr %record, i64 2)
  %scratch_bytes = call i64 @word(ptr %record, i64 3)
  %moves = call i64 @word(ptr %record, i64 4)
  %array = call i64 @word(ptr %record, i64 5)
  %template = getelementptr i64, ptr %record, i64 {FACTS}
  %pairs = getelementptr i64, ptr %template, i64 %words
  %pair_words = shl i64 %moves, 1
  %checks = getelementptr i64, ptr %pairs, i64 %pair_words
  %overflow = alloca i32
  %numbered_words = add i64 %words, 8
  %numbered = alloca i64, i64 %numbered_words, align 64
  %slots = getelementptr i64, ptr %numbered, i64 8
  %words_at = getelementptr i64, ptr %numbered, i64 7
  store i64 %words, ptr %words_at        ; before the slots, for jit.team
  %size = shl i64 %words, 3
  call void @llvm.memcpy.p0.p0.i64(ptr %slots, ptr %template, i64 %size, i1 false)
  %threads_word = call i64 @word(ptr %record, i64 15)
  %threads = trunc i64 %threads_word to i32
  %several = icmp sgt i32 %threads, 1
  %starter_word = call i64 @word(ptr %record, i64 16)
  %starter_at = inttoptr i64 %starter_word to ptr
  %right = icmp eq i64 %given, %count
  br i1 %right, label %ask_starter, label %not
ask_starter:
  br i1 %several, label %starting, label %begin
starting:
  %starter = load atomic i64, ptr %starter_at monotonic, align 8
  %until = call i64 @word(ptr %starter_at, i64 1)
  %started = call i64 @nanoseconds()
  %starts = icmp ne i64 %starter, 0
  %in_time = icmp slt i64 %started, %until
  %may_start = and i1 %starts, %in_time
  br i1 %may_start, label %begin, label %not
begin:
  %start_word = phi i64 [ %starter, %starting ], [ 0, %ask_starter ]
  %begun = phi i64 [ %started, %starting ], [ 0, %ask_starter ]
  %shared_word = call i64 @word(ptr %record, i64 17)
  %shared = inttoptr i64 %shared_word to ptr
  %on_stack = icmp eq i64 %shared_word, 0
  br i1 %on_stack, label %take_stack, label %take_shared
take_stack:
  %own_scratch = alloca i8, i64 %scratch_bytes, align 64
  br label %move
take_shared:
  %taking = cmpxchg ptr %shared, i64 0, i64 1 acquire monotonic
  %taken = extractvalue {{ i64, i1 }} %taking, 1
  %shared_scratch_word = call i64 @word(ptr %shared, i64 1)
  %shared_scratch = inttoptr i64 %shared_scratch_word to ptr
  br i1 %taken, label %move, label %not
move:
  %m = phi i64 [ 0, %take_stack ], [ 0, %take_shared ], [ %next_m, %moved ]
  %scratch = phi ptr [ %own_scratch, %take_stack ], [ %shared_scratch, %take_shared ],
                     [ %scratch, %moved ]
  %more_moves = icmp slt i64 %m, %moves
  br i1 %more_moves, label %moved, label %next
moved:
  %pair_at = shl i64 %m, 1
  %place_m = call i64 @word(ptr %pairs, i64 %pair_at)
  %offset_at = or i64 %pair_at, 1
  %offset_m = call i64 @word(ptr %pairs, i64 %offset_at)
  %target_m = getelementptr i8, ptr %scratch, i64 %offset_m
  %slot_m = getelementptr i64, ptr %slots, i64 %place_m
  store ptr %target_m, ptr %slot_m
  %next_m = add i64 %m, 1
  br label %move
next:
  %i = phi i64 [ 0, %move ], [ %following, %passed ]
  %result = phi ptr [ null, %move ], [ %result_so_far, %passed ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %look, label %done_checks
look:
  %value_at = getelementptr ptr, ptr %args, i64 %i
  %value = load ptr, ptr %value_at
  %check_index = mul i64 %i, {CHECK}
  %check = getelementptr i64, ptr %checks, i64 %check_index
  %kind = call i64 @word(ptr %check, i64 0)
  %first = call i64 @word(ptr %check, i64 1)
  switch i64 %kind, label %same [ i64 {ARRAY}, label %matrix
                                  i64 {COPIED}, label %matrix
                                  i64 {OUTPUT}, label %matrix
                                  i64 {REAL}, label %real
                                  i64 {INTEGER}, label %integer
                                  i64 {COUNT}, label %count_none ]
same:
  %identity = ptrtoint ptr %value to i64
  %is_same = icmp eq i64 %identity, %first
  br i1 %is_same, label %passed, label %other_object
other_object:                              ; it may be an equal value, of that type
  %value_type = call i64 @member(ptr %value, i64 {HEADER - 8})
  %type_wanted = call i64 @word(ptr %check, i64 2)
  %same_type = icmp eq i64 %value_type, %type_wanted
  br i1 %same_type, label %ask_equal, label %miss
ask_equal:
  %expected = inttoptr i64 %first to ptr
  %equal = call i32 @PyObject_RichCompareBool(ptr %value, ptr %expected, i32 {_EQUAL})
  %is_equal = icmp sgt i32 %equal, 0
  br i1 %is_equal, label %passed, label %unequal
unequal:
  call void @PyErr_Clear()
  br label %miss
count_none:
  %argument = ptrtoint ptr %value to i64
  %is_none = icmp eq i64 %argument, %first
  br i1 %is_none, label %ask_count, label %miss
ask_count:
  %function_word = call i64 @word(ptr %check, i64 2)
  %is_function = icmp ne i64 %function_word, 0
  br i1 %is_function, label %call_function, label %last_count
call_function:
  %function = inttoptr i64 %function_word to ptr
  %told_now = call i32 %function()
  %now_word = sext i32 %told_now to i64
  br label %told
last_count:
  %last_word = call i64 @word(ptr %starter_at, i64 2)
  br label %told
told:
  %told_word = phi i64 [ %now_word, %call_function ], [ %last_word, %last_count ]
  %expected_count = call i64 @word(ptr %check, i64 3)
  %as_expected = icmp eq i64 %told_word, %expected_count
  br i1 %as_expected, label %passed, label %miss
matrix:
  %fits = call i1 @fits(ptr %value, ptr %check, i64 %array)
  br i1 %fits, label %fitting, label %miss
fitting:
  %data = call i64 @member(ptr %value, i64 {DATA})
  %is_copied = icmp eq i64 %kind, {COPIED}
  br i1 %is_copied, label %copy, label %address
copy:
  %source = inttoptr i64 %data to ptr
  %target = getelementptr i8, ptr %scratch, i64 %first
  %bytes_copied = call i64 @word(ptr %check, i64 9)
  call void @llvm.memcpy.p0.p0.i64(ptr %target, ptr %source, i64 %bytes_copied, i1 false)
  br label %passed
address:
  %slot = getelementptr i64, ptr %slots, i64 %first
  store i64 %data, ptr %slot
  %is_output = icmp eq i64 %kind, {OUTPUT}
  br i1 %is_output, label %compare, label %passed
compare:
  %j = phi i64 [ 0, %address ], [ %next_j, %is_apart ]
  %others = icmp slt i64 %j, %i
  br i1 %others, label %other, label %passed
other:
  %other_at = getelementptr ptr, ptr %args, i64 %j
  %other_value = load ptr, ptr %other_at
  %other_index = mul i64 %j, {CHECK}
  %other_check = getelementptr i64, ptr %checks, i64 %other_index
  %apart = call i1 @apart(ptr %value, ptr %check, ptr %other_value, ptr %other_check)
  br i1 %apart, label %is_apart, label %miss
is_apart:
  %next_j = add i64 %j, 1
  br label %compare
real:
  %real_type = call i64 @member(ptr %value, i64 {HEADER - 8})
  %real_wanted = call i64 @word(ptr %check, i64 4)
  %is_float = icmp eq i64 %real_type, %real_wanted
  br i1 %is_float, label %float, label %miss
float:
  %number_at = getelementptr i8, ptr %value, i64 {HEADER}
  %single_word = call i64 @word(ptr %check, i64 5)
  %is_single = icmp ne i64 %single_word, 0
  br i1 %is_single, label %single, label %double
single:
  %single_number = load float, ptr %number_at
  %widened = fpext float %single_number to double
  br label %magnitudes
double:
  %double_number = load double, ptr %number_at
  br label %magnitudes
magnitudes:
  %number = phi double [ %widened, %single ], [ %double_number, %double ]
  %magnitude = call double @llvm.fabs.f64(double %number)
  %least_bits = call i64 @word(ptr %check, i64 2)
  %least = bitcast i64 %least_bits to double
  %most_bits = call i64 @word(ptr %check, i64 3)
  %most = bitcast i64 %most_bits to double
  %not_below = fcmp oge double %magnitude, %least
  %below = fcmp olt double %magnitude, %most
  %within = and i1 %not_below, %below
  br i1 %within, label %rounded, label %miss
rounded:
  %narrow = fptrunc double %number to float
  %real_at = getelementptr i8, ptr %scratch, i64 %first
  store float %narrow, ptr %real_at
  br label %passed
integer:
  %int_type = call i64 @member(ptr %value, i64 {HEADER - 8})
  %int_wanted = call i64 @word(ptr %check, i64 5)
  %is_int = icmp eq i64 %int_type, %int_wanted
  br i1 %is_int, label %int, label %miss
int:
  %whole = call i64 @PyLong_AsLongLongAndOverflow(ptr %value, ptr %overflow)
  %beyond = load i32, ptr %overflow
  %fine = icmp eq i32 %beyond, 0
  %low = call i64 @word(ptr %check, i64 2)
  %high = call i64 @word(ptr %check, i64 3)
  %shift = call i64 @word(ptr %check, i64 4)
  %not_less = icmp sge i64 %whole, %low
  %not_more = icmp sle i64 %whole, %high
  %inside = and i1 %not_less, %not_more
  %good = and i1 %inside, %fine
  br i1 %good, label %shifted, label %miss
shifted:
  %sum = add i64 %whole, %shift
  %short = trunc i64 %sum to i32
  %int_at = getelementptr i8, ptr %scratch, i64 %first
  store i32 %short, ptr %int_at
  br label %passed
passed:
  %result_so_far = phi ptr [ %result, %same ], [ %result, %ask_equal ], [ %result, %told ],
                           [ %result, %address ], [ %result, %copy ], [ %value, %compare ],
                           [ %result, %rounded ], [ %result, %shifted ]
  %following = add i64 %i, 1
  br label %next
done_checks:
  %given_output = icmp ne ptr %result, null
  br i1 %given_output, label %keep, label %create
keep:
  call void @Py_IncRef(ptr %result)
  br label %run
create:
  %maker_word = call i64 @word(ptr %record, i64 9)
  %fresh_place = call i64 @word(ptr %record, i64 8)
  %is_direct = icmp ne i64 %maker_word, 0
  br i1 %is_direct, label %direct, label %general
direct:
  %maker = inttoptr i64 %maker_word to ptr
  %array_type = inttoptr i64 %array to ptr
  %descr_word = call i64 @word(ptr %record, i64 10)
  %descr = inttoptr i64 %descr_word to ptr
  %axes_word = call i64 @word(ptr %record, i64 11)
  %axes = trunc i64 %axes_word to i32
  %shape = getelementptr i64, ptr %record, i64 12
  call void @Py_IncRef(ptr %descr)
  %directly = call ptr %maker(ptr %array_type, ptr %descr, i32 %axes, ptr %shape, ptr null,
                              ptr null, i32 0, ptr null)
  br label %made
general:
  %make_word = call i64 @word(ptr %record, i64 6)
  %arguments_word = call i64 @word(ptr %record, i64 7)
  %make = inttoptr i64 %make_word to ptr
  %arguments = inttoptr i64 %arguments_word to ptr
  %generally = call ptr @PyObject_CallObject(ptr %make, ptr %arguments)
  br label %made
made:
  %fresh = phi ptr [ %directly, %direct ], [ %generally, %general ]
  %failed = icmp eq ptr %fresh, null
  br i1 %failed, label %error, label %created
created:
  %fresh_data = call i64 @member(ptr %fresh, i64 {DATA})
  %fresh_slot = getelementptr i64, ptr %slots, i64 %fresh_place
  store i64 %fresh_data, ptr %fresh_slot
  br label %run
run:
  %output = phi ptr [ %result, %keep ], [ %fresh, %created ]
  %kernel_word = call i64 @word(ptr %record, i64 0)
  %kernel = inttoptr i64 %kernel_word to ptr
  %brief_word = call i64 @word(ptr %record, i64 14)
  %brief = icmp ne i64 %brief_word, 0
  br i1 %brief, label %run_at_once, label %give_back
run_at_once:
  call void %kernel(ptr %slots)
  br label %finished
give_back:
  %state = call ptr @PyEval_SaveThread()
  br i1 %several, label %run_shared, label %run_alone
run_alone:
  call void %kernel(ptr %slots)
  br label %take_back
run_shared:
  %start = inttoptr i64 %start_word to ptr
  call void %start(ptr %kernel, ptr %slots, i32 %threads, i32 0)
  %ended = call i64 @nanoseconds()
  %took = sub i64 %ended, %begun
  %long = icmp sge i64 %took, {_STALL}
  br i1 %long, label %stalled, label %take_back
stalled:
  store atomic i64 0, ptr %starter_at monotonic, align 8
  br label %take_back
take_back:
  call void @PyEval_RestoreThread(ptr %state)
  br label %finished
miss:
  br label %finished
error:
  br label %finished
finished:
  %answer = phi ptr [ %output, %run_at_once ], [ %output, %take_back ],
                    [ @_Py_NoneStruct, %miss ], [ null, %error ]
  br i1 %on_stack, label %answered, label %release
release:
  store atomic i64 0, ptr %shared release, align 8
  br label %answered
answered:
  %is_miss = icmp eq ptr %answer, @_Py_NoneStruct
  br i1 %is_miss, label %not, label %end
end:
  ret ptr %answer
not:
  call void @Py_IncRef(ptr @_Py_NoneStruct)
  ret ptr @_Py_NoneStruct
}}
"""
