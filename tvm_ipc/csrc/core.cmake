# SPDX-License-Identifier: Apache-2.0
# What knows nothing of TVM: a library for each folder, and what its sources are compiled with.
# Included by the library and by tests/native, so that tests and sanitizers see what is shipped.
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
option(TVM_IPC_WERROR "Warnings are errors" OFF)
set(TVM_IPC_BUILT "" CACHE PATH "Where the library was built: its parts are taken from there")
find_package(Threads REQUIRED)

set(TVM_IPC_CORE_SOURCES
  arena.cc connection.cc element.cc engine_wire.cc exchange.cc file.cc forked.cc frame.cc group.cc group_across.cc hub.cc join.cc
  layout.cc link.cc machine.cc meeting.cc messages.cc monitor.cc monitor_of_nodes.cc
  node_link.cc nodes.cc rendezvous.cc shows.cc streams.cc teams.cc wait.cc wire.cc wire_block.cc wire_messages.cc
  worker_pipes.cc works.cc)
set(TVM_IPC_SHM_SOURCES
  all_to_all.cc allreduce.cc allreduce_norm.cc backend.cc checks.cc collectives.cc partial.cc point_to_point.cc
  reduce_scatter.cc reduce_to_root.cc shows.cc
  reduce.cc reduce_portable.cc reduce_avx2.cc reduce_avx512.cc reduce_avx512bf16.cc)
# What backends on NVIDIA's devices share; found when somebody asks, and not needed to build.
set(TVM_IPC_DRIVER_SOURCES device.cc driver.cc stream.cc works.cc)
set(TVM_IPC_CUDA_SOURCES
  backend.cc checks.cc endpoint.cc errors.cc info.cc memory.cc messages.cc modules.cc moves.cc
  pinned.cc probe.cc reductions.cc region.cc shows.cc)
set(TVM_IPC_NCCL_SOURCES
  backend.cc collectives.cc communicator.cc communicators.cc flights.cc gathering.cc library.cc memory.cc
  point_to_point.cc reductions.cc)
set(TVM_IPC_MPI_SOURCES
  backend.cc combine.cc lane.cc moves.cc point_to_point.cc reduce_across.cc
  reduce_plan.cc reductions.cc run_move.cc shows.cc)
# Moves messages between nodes, in a process that is no rank.
set(TVM_IPC_ENGINE_SOURCES engine.cc mpi_library.cc mpi_transport.cc turns.cc)
# The table of all of them, which stands above their folders.
set(TVM_IPC_BACKENDS_SOURCES backends.cc)
# TVM_IPC_NO_GPUS is a source that stands for the backends of GPUs, which are not compiled then.
set(TVM_IPC_BLAS_SOURCES
  library.cc matmul.cc matmul_piece.cc select.cc
  kernels_portable.cc kernels_avx2.cc kernels_avx512.cc kernels_avx512bf16.cc kernels_tiles.cc)

# One result on every machine: a compiler may not fuse a multiply and an add on one of them.
set(TVM_IPC_OPTIONS -ffp-contract=off -Wall -Wextra -Wno-unused-parameter)
# Only kernels want -O3, which takes a sixth longer to compile: without it their vectors in small arrays
# go through memory, and they are two to five times slower.
list(APPEND TVM_IPC_OPTIONS $<$<CONFIG:Release>:-O2>)
if(TVM_IPC_WERROR)
  list(APPEND TVM_IPC_OPTIONS -Werror)
endif()
# TVM_IPC_LEVEL, such as -O1, takes the place of both levels.
set(kernel -O3 ${TVM_IPC_LEVEL})
list(APPEND TVM_IPC_OPTIONS ${TVM_IPC_LEVEL})
set(reduce ${kernel})
# Beside a BLAS, whose bits differ from machine to machine, they may fuse.
set(blas ${kernel} -ffp-contract=fast)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(avx2 -mavx2 -mf16c)
  set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512)
  set(bf16 ${avx512} -mavx512bf16)
  set(tiles -mavx2 -mavx512f -mavx512bw -mavx512vl -mamx-tile -mamx-bf16)
  set(fma -mfma)
endif()
function(compile_with source)
  set_source_files_properties(
    ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/${source} PROPERTIES COMPILE_OPTIONS "${ARGN}")
endfunction()
compile_with(shm/reduce_portable.cc ${reduce})
compile_with(shm/reduce_avx2.cc ${reduce} ${avx2} ${fma})
compile_with(shm/reduce_avx512.cc ${reduce} ${avx512})
compile_with(shm/reduce_avx512bf16.cc ${reduce} ${bf16})
compile_with(blas/kernels_portable.cc ${blas})
compile_with(blas/kernels_avx2.cc ${blas} ${avx2} ${fma})
compile_with(blas/kernels_avx512.cc ${blas} ${avx512} ${fma})
compile_with(blas/kernels_avx512bf16.cc ${kernel} ${bf16})
compile_with(blas/kernels_tiles.cc ${kernel} ${tiles})

# Sources that are each compiled alone where a folder is otherwise compiled as one: those whose names
# are those of others on purpose, and those that a test compiles once more in the place of these.
set_source_files_properties(
  ${CMAKE_CURRENT_LIST_DIR}/core/meeting.cc ${CMAKE_CURRENT_LIST_DIR}/shm/allreduce.cc
  ${CMAKE_CURRENT_LIST_DIR}/shm/reduce_portable.cc
  PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)

# core_library(<folder> <library>...): what is in a folder, and what it needs.
function(core_library folder)
  string(TOUPPER ${folder} name)
  set(library tvm_ipc_${folder})
  if(TVM_IPC_BUILT)
    add_library(${library} STATIC IMPORTED)
    set_target_properties(${library} PROPERTIES
      IMPORTED_LOCATION ${TVM_IPC_BUILT}/lib${library}.a)
  else()
    set(place ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/${folder}/)
    if(folder STREQUAL backends)
      set(place ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/)
    endif()
    list(TRANSFORM TVM_IPC_${name}_SOURCES PREPEND ${place} OUTPUT_VARIABLE sources)
    if(folder STREQUAL backends)
      list(APPEND sources ${TVM_IPC_NO_GPUS})
    endif()
    add_library(${library} STATIC ${sources})
    target_compile_options(${library} PRIVATE ${TVM_IPC_OPTIONS})
    set_target_properties(${library} PROPERTIES POSITION_INDEPENDENT_CODE ON
      CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
    target_include_directories(${library} PRIVATE ${CMAKE_CURRENT_FUNCTION_LIST_DIR})
  endif()
  target_include_directories(${library} INTERFACE ${CMAKE_CURRENT_FUNCTION_LIST_DIR})
  target_link_libraries(${library} INTERFACE ${ARGN} Threads::Threads ${CMAKE_DL_LIBS})
endfunction()
core_library(core)
core_library(shm tvm_ipc_core)
core_library(mpi tvm_ipc_shm)
core_library(engine tvm_ipc_core)
if(NOT TVM_IPC_NO_GPUS)
  core_library(driver tvm_ipc_core)
  core_library(cuda tvm_ipc_core tvm_ipc_driver tvm_ipc_images)
  core_library(nccl tvm_ipc_driver tvm_ipc_core)
  set(gpus tvm_ipc_cuda tvm_ipc_nccl)
endif()
core_library(backends tvm_ipc_mpi tvm_ipc_shm ${gpus})
core_library(blas tvm_ipc_core)

# The compiled CUDA kernels: a table of bytes.
include(${CMAKE_CURRENT_LIST_DIR}/cuda/images.cmake)
