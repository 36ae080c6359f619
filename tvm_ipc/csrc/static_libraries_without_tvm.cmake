# SPDX-License-Identifier: Apache-2.0
# Libraries that do not depend on TVM, one for each folder, and their compile options.
# Included by the library and by tests/native, so that tests and sanitizers run what is shipped.
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
option(TVM_IPC_WERROR "Warnings are errors" OFF)
set(TVM_IPC_BUILT "" CACHE PATH "Where the library was built: its parts are taken from there")
find_package(Threads REQUIRED)

set(TVM_IPC_CORE_SOURCES
  admit_workers_to_session.cc arena_allocator.cc async_queue.cc atfork_descriptors.cc
  worker_socket_to_session_server.cc element_type_and_reduce_kind.cc emulated_link.cc
  internode_request_queue_engine_side.cc exposed_buffers.cc file_descriptor_and_memory_file.cc
  frame.cc handle_allgather_via_session_server.cc machine_name_and_memory.cc
  internode_arena_block.cc send_receive_internode_messages.cc internode_request_queue.cc
  worker_handshake.cc point_to_point_waits_and_errors.cc
  internode_control_messages_and_heartbeats.cc internode_session_event_relay.cc
  rank_runtime_state.cc session_server.cc current_stream_hooks.cc collective_step_barrier.cc
  team_members_by_node.cc teams.cc wait.cc redirect_dead_worker_pipes.cc
  worker_status_and_error_table.cc)
set(TVM_IPC_SHM_SOURCES
  all_to_all.cc allreduce.cc allreduce_norm.cc endpoint_and_backend.cc argument_checks.cc
  data_movement_collectives.cc reduce_in_groups_round_once.cc point_to_point.cc
  reduce_scatter.cc reduce_to_root.cc exposed_buffers.cc select_kernels_by_instruction_set.cc
  reduce_portable.cc reduce_avx2.cc reduce_avx512.cc reduce_avx512bf16.cc)
# What the backends for NVIDIA devices share. The driver is loaded on demand; builds do not need it.
set(TVM_IPC_DRIVER_SOURCES
  device_properties_and_context.cc cuda_driver_api.cc owned_streams_and_events.cc
  comm_stream_async_queue.cc)
set(TVM_IPC_CUDA_SOURCES
  backend_factory.cc buffer_size_and_overlap_checks.cc cuda_endpoint.cc kernel_errors.cc
  device_support_report.cc exportable_memory.cc point_to_point.cc modules.cc
  data_movement_collectives.cc host_registration.cc probe_device_pair_sharing.cc reductions.cc
  map_peer_regions.cc exposed_buffer_peer_copies.cc)
set(TVM_IPC_NCCL_SOURCES
  endpoint_and_backend.cc data_movement_collectives.cc communicator.cc
  team_communicators_and_watch_thread.cc in_flight_ops.cc host_barrier_and_agreement.cc
  library.cc ipc_scope_heap_without_peers.cc point_to_point.cc reductions.cc)
set(TVM_IPC_MPI_SOURCES
  endpoint_and_backend.cc internode_reduce_arithmetic.cc reduction_slice_leader.cc
  data_movement_collectives.cc point_to_point.cc pipelined_internode_reduce.cc
  internode_reduce_plan.cc internode_reduction_entry_points.cc run_move.cc
  exposed_buffers_sent_to_nodes.cc)
# The engine moves messages between nodes, in a process that is not a rank.
set(TVM_IPC_ENGINE_SOURCES
  internode_progress_engine.cc mpi_library.cc mpi_transport.cc in_flight_send_limit.cc)
# The table of backends, in the folder above theirs.
set(TVM_IPC_BACKENDS_SOURCES backends.cc)
# TVM_IPC_NO_GPUS is a source that replaces the GPU backends, which are then not compiled.
set(TVM_IPC_BLAS_SOURCES
  library.cc matmul_multi_thread.cc run_matmul_piece.cc select_instruction_set.cc
  kernel_table_portable.cc kernel_table_avx2.cc kernel_table_avx512.cc bf16_matmul_avx512bf16.cc
  bf16_matmul_amx.cc)

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
compile_with(blas/kernel_table_portable.cc ${blas})
compile_with(blas/kernel_table_avx2.cc ${blas} ${avx2} ${fma})
compile_with(blas/kernel_table_avx512.cc ${blas} ${avx512} ${fma})
compile_with(blas/bf16_matmul_avx512bf16.cc ${kernel} ${bf16})
compile_with(blas/bf16_matmul_amx.cc ${kernel} ${tiles})

# Sources that are compiled separately even in a unity build: those that define the same names as
# other sources on purpose, and those that a test replaces with its own build of them.
set_source_files_properties(
  ${CMAKE_CURRENT_LIST_DIR}/core/collective_step_barrier.cc ${CMAKE_CURRENT_LIST_DIR}/shm/allreduce.cc
  ${CMAKE_CURRENT_LIST_DIR}/shm/reduce_portable.cc
  PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)

# core_library(<folder> <library>...): the library of a folder, and the libraries it depends on.
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

# The compiled CUDA kernels, as a table of bytes.
include(${CMAKE_CURRENT_LIST_DIR}/cuda/images.cmake)
