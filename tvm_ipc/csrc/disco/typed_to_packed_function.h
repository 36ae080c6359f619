/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file typed_to_packed_function.h
 * \brief Typed C++ functions as packed functions.
 *
 * TVM's own templates compile the error handling again for each argument of each function, which
 * took a fifth of the build time of this library. Here it is compiled once for each type.
 */
#ifndef TVM_IPC_DISCO_TYPED_TO_PACKED_FUNCTION_H_
#define TVM_IPC_DISCO_TYPED_TO_PACKED_FUNCTION_H_

#include <tvm/ffi/function.h>

#include <cstddef>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "core/communication_backend.h"

namespace tvm_ipc {

/*! \brief The name of a type for people, and its schema as JSON for programs. */
struct TypeTexts {
  std::string (*name)();
  std::string (*schema)();
};

template <typename T>
inline constexpr TypeTexts kTextsOf{tvm::ffi::details::Type2Str<T>::v,
                                    tvm::ffi::details::TypeSchemaImpl<T>::v};

/*! \brief The types of a function. If `result` is null, it takes any arguments. */
struct Signature {
  const TypeTexts* result;
  const TypeTexts* const* parameters;
  size_t count;
};

template <typename Result, typename... Parameters>
struct SignatureOf {
  // An additional entry, because an array cannot be empty.
  static constexpr const TypeTexts* kParameters[] = {&kTextsOf<Parameters>..., nullptr};
  static constexpr Signature kValue{&kTextsOf<Result>, kParameters, sizeof...(Parameters)};
};

/*! \brief A call of a function. */
struct PackedCall {
  /*! \brief The full name of the function, and the part after the last dot. */
  const std::string& name;
  const std::string& what;
  const Signature& signature;
  /*! \brief The backend whose sessions the function is for; nullptr means any. */
  const Backend* backend;
  tvm::ffi::PackedArgs arguments;
};

[[noreturn]] void RefuseArgument(const PackedCall& call, int index, const TypeTexts& wanted,
                                 const std::string& found);

/*! \brief Return an argument; throw if it has another type. */
template <typename T>
__attribute__((noinline)) T ArgumentOf(const PackedCall& call, int index) {
  const tvm::ffi::AnyView given = call.arguments[index];
  if constexpr (std::is_same_v<T, tvm::ffi::Any>) {
    return T(given);
  } else {
    std::optional<T> value = given.try_cast<T>();
    if (value.has_value()) return *std::move(value);
    const TVMFFIAny raw = given.CopyToTVMFFIAny();
    RefuseArgument(call, index, kTextsOf<T>, tvm::ffi::TypeTraits<T>::GetMismatchTypeInfo(&raw));
  }
}

template <typename T>
__attribute__((noinline)) void Return(tvm::ffi::Any* result, T value) {
  *result = std::move(value);
}

/*! \brief Call a function with the arguments of the call. */
template <typename Result, typename... Parameters, typename Function, size_t... I>
void CallWithArguments(const PackedCall& call, tvm::ffi::Any* result, const Function& function,
                       std::index_sequence<I...>) {
  if constexpr (std::is_void_v<Result>) {
    function(ArgumentOf<Parameters>(call, I)...);
  } else {
    Return<Result>(result, function(ArgumentOf<Parameters>(call, I)...));
  }
}

/*! \brief The code that runs when the function is called. */
using Body = void (*)(const PackedCall& call, tvm::ffi::Any* result);

/*! \brief Register a function. The core's errors are thrown as TVM's. */
void Define(const std::string& name, const Signature& signature, Body body,
            const Backend* backend = nullptr);

/*! \brief Register a class with `kSignature` and `Run` as a function. */
template <typename How>
void Define(const std::string& name, const Backend* backend = nullptr) {
  Define(name, How::kSignature, How::Run, backend);
}

/*! \brief A plain function. */
template <auto function>
struct Plain;
template <typename Result, typename... Parameters, Result (*function)(Parameters...)>
struct Plain<function> {
  static constexpr const Signature& kSignature = SignatureOf<Result, Parameters...>::kValue;

  static void Run(const PackedCall& call, tvm::ffi::Any* result) {
    CallWithArguments<Result, Parameters...>(call, result, function,
                                             std::index_sequence_for<Parameters...>());
  }
};

/*! \brief A function that reads its arguments itself. */
template <void (*function)(tvm::ffi::PackedArgs, tvm::ffi::Any*)>
struct Variadic {
  static constexpr Signature kSignature{nullptr, nullptr, 0};

  static void Run(const PackedCall& call, tvm::ffi::Any* result) {
    function(call.arguments, result);
  }
};

/*! \brief A function whose first parameter is a backend. */
template <auto function>
struct OfBackend;
template <typename Result, typename... Parameters,
          Result (*function)(const Backend&, Parameters...)>
struct OfBackend<function> {
  static constexpr const Signature& kSignature = SignatureOf<Result, Parameters...>::kValue;

  static void Run(const PackedCall& call, tvm::ffi::Any* result) {
    auto with_backend = [&](Parameters... arguments) {
      return function(*call.backend, std::move(arguments)...);
    };
    CallWithArguments<Result, Parameters...>(call, result, with_backend,
                                             std::index_sequence_for<Parameters...>());
  }
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_TYPED_TO_PACKED_FUNCTION_H_
