# SPDX-License-Identifier: Apache-2.0
# Libraries that do not depend on TVM, one for each folder, and their compile options.
# Included by the library and by tests/native, so that tests and sanitizers run what is shipped.
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
option(TVM_IPC_WERROR "Warnings are errors" OFF)
set(TVM_IPC_BUILT "" CACHE PATH "Where the library was built: its parts are taken from there")
find_package(Threads REQUIRED)

# The sources of these folders that depend on TVM.
set(TVM_IPC_SOURCES_WITH_TVM
  blas/attention_packed_function.cc blas/batch_attention_packed_function.cc
  blas/matmul_packed_function.cc blas/kernel_threads.cc
  engine/serve_mpi_for_node_agent.cc)

# Results must be identical on all machines, so the compiler may not fuse multiplications and
# additions.
set(TVM_IPC_OPTIONS -ffp-contract=off -Wall -Wextra -Wno-unused-parameter)
# Only kernels need -O3, which takes a sixth longer to compile. Without it, their small arrays of
# vectors go through memory, and they are two to five times slower.
list(APPEND TVM_IPC_OPTIONS $<$<CONFIG:Release>:-O2>)
if(TVM_IPC_WERROR)
  list(APPEND TVM_IPC_OPTIONS -Werror)
endif()
# TVM_IPC_LEVEL, such as -O1, replaces both levels.
set(kernel -O3 ${TVM_IPC_LEVEL})
list(APPEND TVM_IPC_OPTIONS ${TVM_IPC_LEVEL})
set(reduce ${kernel})
# The BLAS kernels may fuse, because results of the BLAS differ between machines anyway.
set(blas ${kernel} -ffp-contract=fast)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(avx2 -mavx2 -mf16c)
  set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512)
  set(bf16 ${avx512} -mavx512bf16)
  set(amx -mamx-tile -mamx-bf16)
  set(tiles -mavx2 -mavx512f -mavx512bw -mavx512vl ${amx})
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
compile_with(blas/kernel_table_portable.cc ${blas})
compile_with(blas/kernel_table_avx2.cc ${blas} ${avx2} ${fma})
compile_with(blas/fixed_order_matmul_avx2.cc ${blas} ${avx2} ${fma})
compile_with(blas/kernel_table_avx512.cc ${blas} ${avx512} ${fma})
compile_with(blas/bf16_matmul_avx512bf16.cc ${kernel} ${bf16})
compile_with(blas/bf16_matmul_amx.cc ${kernel} ${tiles})
compile_with(blas/attention_avx512bf16.cc ${blas} ${bf16} ${fma})
compile_with(blas/attention_amx.cc ${blas} ${bf16} ${fma} ${amx})

# Sources that are compiled separately even in a unity build: those that define the same names as
# other sources on purpose, and those that a test replaces with its own build of them.
set_source_files_properties(
  ${CMAKE_CURRENT_LIST_DIR}/core/collective_step_barrier.cc ${CMAKE_CURRENT_LIST_DIR}/shm/allreduce.cc
  ${CMAKE_CURRENT_LIST_DIR}/shm/reduce_portable.cc
  PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)

# core_library(<folder> <library>...): the library of a folder, and the libraries it depends on. The
# folder backends is the one above the others.
function(core_library folder)
  set(library tvm_ipc_${folder})
  if(TVM_IPC_BUILT)
    add_library(${library} STATIC IMPORTED)
    set_target_properties(${library} PROPERTIES
      IMPORTED_LOCATION ${TVM_IPC_BUILT}/lib${library}.a)
  else()
    set(csrc ${CMAKE_CURRENT_FUNCTION_LIST_DIR})
    if(folder STREQUAL backends)
      # The table of backends. TVM_IPC_NO_GPUS is a source that replaces the GPU backends, which are
      # then not compiled.
      set(sources ${csrc}/backends.cc ${TVM_IPC_NO_GPUS})
    else()
      file(GLOB sources CONFIGURE_DEPENDS ${csrc}/${folder}/*.cc)
      list(TRANSFORM TVM_IPC_SOURCES_WITH_TVM PREPEND ${csrc}/ OUTPUT_VARIABLE with_tvm)
      list(REMOVE_ITEM sources ${with_tvm})
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
# The engine moves messages between nodes, in a process that is not a rank.
core_library(engine tvm_ipc_core)
if(NOT TVM_IPC_NO_GPUS)
  # What the backends for NVIDIA devices share. The driver is loaded on demand; builds do not need it.
  core_library(driver tvm_ipc_core)
  core_library(cuda tvm_ipc_core tvm_ipc_driver tvm_ipc_images)
  core_library(nccl tvm_ipc_driver tvm_ipc_core)
  set(gpus tvm_ipc_cuda tvm_ipc_nccl)
endif()
core_library(backends tvm_ipc_mpi tvm_ipc_shm ${gpus})
core_library(blas tvm_ipc_core)

# The compiled CUDA kernels, as a table of bytes.
include(${CMAKE_CURRENT_LIST_DIR}/cuda/images.cmake)
