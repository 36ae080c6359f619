/* SPDX-License-Identifier: Apache-2.0 */
/*! \file serialize_worker_values.cc */
#include "disco/serialize_worker_values.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/extra/serialization.h>
#include <tvm/ffi/string.h>
#include <tvm/runtime/tensor.h>

#include <cstring>
#include <vector>

#include "core/error.h"

namespace tvm_ipc {

namespace {

namespace ffi = tvm::ffi;
using tvm::runtime::Tensor;

class Writer {
 public:
  void Write(const ffi::Any& value) {
    switch (value.type_index()) {
      case ffi::TypeIndex::kTVMFFINone:
        return Tag('n');
      case ffi::TypeIndex::kTVMFFIBool:
        return Plain('b', value.cast<bool>());
      case ffi::TypeIndex::kTVMFFIInt:
        return Plain('i', value.cast<int64_t>());
      case ffi::TypeIndex::kTVMFFIFloat:
        return Plain('f', value.cast<double>());
      case ffi::TypeIndex::kTVMFFIDataType:
        return Plain('d', value.cast<DLDataType>());
      case ffi::TypeIndex::kTVMFFIDevice:
        return Plain('v', value.cast<DLDevice>());
      default:
        break;
    }
    if (auto text = value.as<ffi::String>()) return Sized('s', text->data(), text->size());
    if (auto raw = value.as<ffi::Bytes>()) return Sized('y', raw->data(), raw->size());
    if (auto shape = value.as<ffi::Shape>()) {
      return Sized('h', shape->data(), shape->size() * sizeof(int64_t));
    }
    if (auto tensor = value.as<Tensor>()) return WriteTensor(*tensor);
    if (auto array = value.as<ffi::Array<ffi::Any>>()) {
      Plain('a', static_cast<uint64_t>(array->size()));
      for (const ffi::Any& element : *array) Write(element);
      return;
    }
    const std::string json = ffi::json::Stringify(ffi::ToJSONGraph(value));
    Sized('j', json.data(), json.size());
  }
  std::string bytes;

 private:
  void Tag(char tag) { bytes += tag; }
  void Raw(const void* data, size_t size) { bytes.append(static_cast<const char*>(data), size); }
  template <typename T>
  void Plain(char tag, const T& value) {
    Tag(tag);
    Raw(&value, sizeof(value));
  }
  void Sized(char tag, const void* data, size_t size) {
    Plain(tag, static_cast<uint64_t>(size));
    Raw(data, size);
  }
  void WriteTensor(const Tensor& tensor) {
    Plain('t', tensor->dtype);
    const uint64_t ndim = static_cast<uint64_t>(tensor->ndim);
    Raw(&ndim, sizeof(ndim));
    Raw(tensor->shape, ndim * sizeof(int64_t));
    const size_t size = ffi::GetDataSize(*tensor.operator->());
    const size_t at = bytes.size();
    bytes.resize(at + size);
    Tensor::CopyToBytes(tensor.operator->(), bytes.data() + at, size);
  }
};

class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  ffi::Any Read() {
    switch (const char tag = Plain<char>()) {
      case 'n':
        return ffi::Any(nullptr);
      case 'b':
        return Plain<bool>();
      case 'i':
        return Plain<int64_t>();
      case 'f':
        return Plain<double>();
      case 'd':
        return Plain<DLDataType>();
      case 'v':
        return Plain<DLDevice>();
      case 's':
        return ffi::String(Sized());
      case 'y':
        return ffi::Bytes(Sized());
      case 'h': {
        const std::string raw = Sized();
        std::vector<int64_t> extents(raw.size() / sizeof(int64_t));
        memcpy(extents.data(), raw.data(), raw.size());
        return ffi::Shape(extents);
      }
      case 't':
        return ReadTensor();
      case 'a': {
        ffi::Array<ffi::Any> array;
        for (uint64_t left = Plain<uint64_t>(); left > 0; --left) array.push_back(Read());
        return array;
      }
      case 'j':
        return ffi::FromJSONGraph(ffi::json::Parse(Sized()));
      default:
        Fail(kind::kRuntime, "a worker sent a value of unknown kind '", tag, "'");
    }
  }

 private:
  template <typename T>
  T Plain() {
    T value;
    memcpy(&value, bytes_.data() + at_, sizeof(value));
    at_ += sizeof(value);
    return value;
  }
  std::string Sized() {
    const uint64_t size = Plain<uint64_t>();
    std::string raw = bytes_.substr(at_, size);
    at_ += size;
    return raw;
  }
  ffi::Any ReadTensor() {
    const DLDataType dtype = Plain<DLDataType>();
    std::vector<int64_t> extents(Plain<uint64_t>());
    memcpy(extents.data(), bytes_.data() + at_, extents.size() * sizeof(int64_t));
    at_ += extents.size() * sizeof(int64_t);
    Tensor tensor = Tensor::Empty(ffi::Shape(extents), dtype, DLDevice{kDLCPU, 0});
    const size_t size = ffi::GetDataSize(*tensor.operator->());
    tensor.CopyFromBytes(bytes_.data() + at_, size);
    at_ += size;
    return tensor;
  }

  const std::string& bytes_;
  size_t at_ = 0;
};

}  // namespace

std::string PackValue(const ffi::Any& value) {
  Writer writer;
  writer.Write(value);
  return std::move(writer.bytes);
}

ffi::Any UnpackValue(const std::string& bytes) { return Reader(bytes).Read(); }

}  // namespace tvm_ipc
