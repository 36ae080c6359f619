/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file typed_to_packed_function.cc
 * \brief The table of packed functions, and errors of their arguments.
 */
#include "disco/typed_to_packed_function.h"

#include <tvm/ffi/error.h>
#include <tvm/ffi/string.h>

#include "disco/error_conversion.h"

namespace tvm_ipc {

namespace {

namespace ffi = tvm::ffi;

/*! \brief Return the function with its types, as text for errors. */
std::string TextOf(const PackedCall& call) {
  std::string text = call.name + "(";
  for (size_t i = 0; i < call.signature.count; ++i) {
    text += Text(i == 0 ? "" : ", ", i, ": ", call.signature.parameters[i]->name());
  }
  return text + ") -> " + call.signature.result->name();
}

/*! \brief Return the function's types as JSON. */
std::string SchemaOf(const Signature& signature) {
  if (signature.result == nullptr) return ffi::details::TypeSchemaImpl<ffi::Function>::v();
  std::string text = Text("{\"type\":\"", ffi::StaticTypeKey::kTVMFFIFunction, "\",\"args\":[",
                          signature.result->schema());
  for (size_t i = 0; i < signature.count; ++i) text += "," + signature.parameters[i]->schema();
  return text + "]}";
}

[[noreturn]] void RefuseCount(const PackedCall& call) {
  TVM_FFI_THROW(TypeError) << "Mismatched number of arguments when calling: `" << TextOf(call)
                           << "`. Expected " << call.signature.count << " but got "
                           << call.arguments.size() << " arguments";
  TVM_FFI_UNREACHABLE();
}

}  // namespace

void RefuseArgument(const PackedCall& call, int index, const TypeTexts& wanted,
                    const std::string& found) {
  TVM_FFI_THROW(TypeError) << "Mismatched type on argument #" << index << " when calling: `"
                           << TextOf(call) << "`. Expected `" << wanted.name() << "` but got `"
                           << found << '`';
  TVM_FFI_UNREACHABLE();
}

void Define(const std::string& name, const Signature& signature, Body body,
            const Backend* backend) {
  auto call_packed = [name, what = name.substr(name.rfind('.') + 1), &signature, body, backend](
                         const ffi::AnyView* arguments, int32_t count, ffi::Any* result) {
    WithErrors([&] {
      const PackedCall call{name, what, signature, backend, ffi::PackedArgs(arguments, count)};
      if (signature.result != nullptr && signature.count != static_cast<size_t>(count)) {
        RefuseCount(call);
      }
      body(call, result);
    });
  };
  const ffi::Function function = ffi::Function::FromPacked(std::move(call_packed));
  const std::string metadata =
      Text("{\"type_schema\":", std::string(ffi::EscapeStringJSON(SchemaOf(signature))), "}");
  TVMFFIMethodInfo info{};
  info.name = TVMFFIByteArray{name.data(), name.size()};
  info.metadata = TVMFFIByteArray{metadata.data(), metadata.size()};
  info.method = ffi::AnyView(function).CopyToTVMFFIAny();
  TVM_FFI_CHECK_SAFE_CALL(TVMFFIFunctionSetGlobalFromMethodInfo(&info, 0));
}

}  // namespace tvm_ipc
