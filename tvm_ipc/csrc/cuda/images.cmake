# SPDX-License-Identifier: Apache-2.0
# The library tvm_ipc_images: kernels/*.cu compiled for each target, with the table of embedded_kernel_images.h.
# Unchanged sources are not compiled again.
option(TVM_IPC_CUDA "Compile the CUDA kernels; wants NVRTC of the wheel nvidia-cuda-nvrtc" OFF)
# Machine code for Ampere, Hopper and both Blackwells, and PTX for devices that are none of these.
set(TVM_IPC_CUDA_TARGETS sm_80 sm_90 sm_100 sm_120 compute_90
  CACHE STRING "What kernels are compiled for: sm_NN is machine code, compute_NN is PTX")

# require_nvrtc(<folder of compile.py>): print the path of NVRTC, or fail with install instructions.
function(require_nvrtc folder)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -B -c
      "import sys; sys.path.insert(0, sys.argv[1]); import compile; print(compile.find_nvrtc())"
      ${folder}
    OUTPUT_VARIABLE found ERROR_VARIABLE why RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(failed)
    message(FATAL_ERROR
      "tvm-ipc compiles its CUDA kernels with NVRTC 13.0, which ${Python_EXECUTABLE} does not find. "
      "Either install it:\n  pip install 'nvidia-cuda-nvrtc==13.0.*'\nor build without the kernels, "
      "for CPUs alone: set the environment variable TVM_IPC_CUDA=OFF for pip, or give cmake "
      "-DTVM_IPC_CUDA=OFF.\n${why}")
  endif()
  message(STATUS "CUDA kernels are compiled by ${found} for ${TVM_IPC_CUDA_TARGETS}")
endfunction()

# compile_kernels(<table>): write the source of the table, and add the commands that compile the
# images in it.
function(compile_kernels table)
  set(folder ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/kernels)
  set(made ${CMAKE_CURRENT_BINARY_DIR}/kernels)
  file(GLOB sources CONFIGURE_DEPENDS ${folder}/*.cu)
  file(GLOB depends CONFIGURE_DEPENDS ${folder}/*.cu ${folder}/*.cuh ${folder}/*.h)
  if(TVM_IPC_CUDA AND sources)
    find_package(Python REQUIRED COMPONENTS Interpreter)
    require_nvrtc(${folder})
    file(MAKE_DIRECTORY ${made})
  else()
    set(sources)
  endif()
  # Machine code before PTX.
  list(SORT TVM_IPC_CUDA_TARGETS ORDER DESCENDING)
  set(images)
  set(count 0)
  foreach(source ${sources})
    get_filename_component(name ${source} NAME_WE)
    foreach(target ${TVM_IPC_CUDA_TARGETS})
      if(NOT target MATCHES "^(sm|compute)_([0-9]+)$")
        message(FATAL_ERROR "TVM_IPC_CUDA_TARGETS: ${target} is neither sm_NN nor compute_NN")
      endif()
      set(capability ${CMAKE_MATCH_2})
      set(ptx false)
      if(CMAKE_MATCH_1 STREQUAL "compute")
        set(ptx true)
      endif()
      set(image ${made}/${name}.${target})
      add_custom_command(OUTPUT ${image}
        COMMAND ${Python_EXECUTABLE} -B ${folder}/compile.py ${source} ${target} ${image}
        DEPENDS ${depends} ${folder}/compile.py
        COMMENT "Compiling ${name}.cu for ${target}" VERBATIM)
      list(APPEND images ${image})
      string(APPEND bytes "BYTES(${count}, \"${image}\")\n")
      string(APPEND rows
        "    {\"${name}\", ${capability}, ${ptx}, image${count}, end${count}},\n")
      math(EXPR count "${count} + 1")
    endforeach()
  endforeach()
  file(CONFIGURE OUTPUT ${table} @ONLY CONTENT [[
// Written by cuda/images.cmake.
#include "cuda/embedded_kernel_images.h"

#define BYTES(number, path)                                                  \
  extern "C" __attribute__((visibility("hidden"))) const uint8_t image##number[], end##number[]; \
  asm(".pushsection .rodata.tvm_ipc_images, \"a\"\n"                         \
      ".balign 16\n"                                                         \
      "image" #number ": .incbin \"" path "\"\n"                             \
      "end" #number ": .byte 0\n"                                            \
      ".popsection\n");
@bytes@
namespace tvm_ipc::cuda {
const KernelImage kKernelImages[] = {
@rows@    {nullptr, 0, false, nullptr, nullptr},
};
const size_t kNumKernelImages = @count@;
}  // namespace tvm_ipc::cuda
]])
  # The compiler does not report the files that the assembler includes.
  set_source_files_properties(${table} PROPERTIES OBJECT_DEPENDS "${images}")
endfunction()

if(TVM_IPC_BUILT)
  add_library(tvm_ipc_images STATIC IMPORTED)
  set_target_properties(tvm_ipc_images PROPERTIES
    IMPORTED_LOCATION ${TVM_IPC_BUILT}/libtvm_ipc_images.a)
else()
  set(table ${CMAKE_CURRENT_BINARY_DIR}/kernel_images.cc)
  compile_kernels(${table})
  add_library(tvm_ipc_images STATIC ${table})
  target_include_directories(tvm_ipc_images PRIVATE ${CMAKE_CURRENT_LIST_DIR}/..)
  set_target_properties(tvm_ipc_images PROPERTIES POSITION_INDEPENDENT_CODE ON
    CXX_VISIBILITY_PRESET hidden)
endif()
