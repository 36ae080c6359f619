# SPDX-License-Identifier: Apache-2.0
# What knows nothing of TVM: its sources, and what each of them is compiled with. Included by the
# library and by tests/native, so that the sanitizers see what is shipped.
set(TVM_IPC_REDUCE_SOURCES reduce.cc reduce_portable.cc reduce_avx2.cc reduce_avx512.cc)
set(TVM_IPC_CORE_SOURCES
  allreduce.cc arena.cc bootstrap.cc collectives.cc forked.cc group.cc hub.cc point_to_point.cc
  wait.cc worker_pipes.cc)
set(TVM_IPC_BLAS_SOURCES
  blas_library.cc blas_select.cc matmul.cc matmul_piece.cc
  blas_portable.cc blas_avx2.cc blas_avx512.cc blas_tiles.cc)
foreach(part REDUCE CORE BLAS)
  list(TRANSFORM TVM_IPC_${part}_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
endforeach()

# One result on every machine: a compiler may not fuse a multiply and an add on one of them.
set(TVM_IPC_CORE_OPTIONS -ffp-contract=off)
# Beside a BLAS, whose bits differ from machine to machine, they may fuse.
set(blas -O3 -ffp-contract=fast)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(avx2 -mavx2 -mf16c)
  set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512)
  set(tiles -mavx2 -mavx512f -mavx512bw -mavx512vl -mamx-tile -mamx-bf16)
  set(fma -mfma)
endif()
function(compile_with source)
  set_source_files_properties(
    ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/${source} PROPERTIES COMPILE_OPTIONS "${ARGN}")
endfunction()
compile_with(reduce_avx2.cc ${avx2})
compile_with(reduce_avx512.cc ${avx512})
compile_with(blas_portable.cc ${blas})
compile_with(blas_avx2.cc ${blas} ${avx2} ${fma})
compile_with(blas_avx512.cc ${blas} ${avx512} ${fma})
compile_with(blas_tiles.cc -O3 ${tiles})
