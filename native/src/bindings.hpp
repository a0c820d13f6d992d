// What the bindings share: arguments as views of numpy arrays, results as new numpy arrays.
//
// Views use the buffer protocol rather than nanobind's ndarray: it costs a fraction of a microsecond an array, never
// copies, and lets every bad shape or dtype be a ValueError that names the argument. Views and arrays are made and
// dropped with the GIL held; their memory may be used without it.
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace tierkv::bindings {

namespace nb = nanobind;

// numpy's names for the element types that cross the border.
template <typename T>
constexpr const char* dtype_name() {
    if constexpr (std::is_same_v<T, bool>) return "bool";
    if constexpr (std::is_same_v<T, uint8_t>) return "uint8";
    if constexpr (std::is_same_v<T, uint32_t>) return "uint32";
    if constexpr (std::is_same_v<T, uint64_t>) return "uint64";
    if constexpr (std::is_same_v<T, int64_t>) return "int64";
}

template <typename T>
bool format_matches(std::string_view format) {
    if (!format.empty() && (format[0] == '=' || format[0] == '@' || format[0] == '<')) format.remove_prefix(1);
    if (format.size() != 1) return false;
    constexpr std::string_view kSigned = "bhilq";
    constexpr std::string_view kUnsigned = "BHILQ";
    if constexpr (std::is_same_v<T, bool>) return format == "?";
    return (std::is_signed_v<T> ? kSigned : kUnsigned).find(format[0]) != std::string_view::npos;
}

// A C-contiguous array argument of `dimensions` dimensions, held for as long as this lives.
template <typename T>
class Array {
  public:
    Array(nb::handle argument, const char* name, int dimensions = 1) {
        if (PyObject_GetBuffer(argument.ptr(), &view_, PyBUF_FORMAT | PyBUF_ND) != 0) {
            PyErr_Clear();
            refuse(name, dimensions);
        }
        if (view_.ndim != dimensions || view_.itemsize != static_cast<Py_ssize_t>(sizeof(T)) ||
            !format_matches<T>(view_.format == nullptr ? "B" : view_.format)) {
            PyBuffer_Release(&view_);
            refuse(name, dimensions);
        }
    }
    ~Array() { PyBuffer_Release(&view_); }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;

    size_t size() const { return static_cast<size_t>(view_.shape[0]); }
    size_t columns() const { return static_cast<size_t>(view_.shape[1]); }
    const T* data() const { return static_cast<const T*>(view_.buf); }
    std::span<const T> span() const { return {data(), size()}; }

  private:
    [[noreturn]] static void refuse(const char* name, int dimensions) {
        throw nb::value_error((std::string(name) + ": a C-contiguous numpy array of " + dtype_name<T>() + " with " +
                               std::to_string(dimensions) + (dimensions == 1 ? " dimension" : " dimensions") +
                               " is needed")
                                  .c_str());
    }
    Py_buffer view_{};
};

// (n, 32) uint8.
class Hashes : public Array<uint8_t> {
  public:
    explicit Hashes(nb::handle argument) : Array<uint8_t>(argument, "hashes", 2) {
        if (columns() != 32) {
            throw nb::value_error(
                ("hashes: the shape must be (n, 32), got (n, " + std::to_string(columns()) + ")").c_str());
        }
    }
};

// numpy.empty and the dtypes, looked up once. Never freed: the module lives as long as the interpreter.
struct Numpy {
    PyObject* empty;
    PyObject* types[5];
    static const Numpy& get() {
        static const Numpy numpy = [] {
            const nb::module_ module = nb::module_::import_("numpy");
            Numpy made{};
            made.empty = nb::object(module.attr("empty")).release().ptr();
            const char* names[5] = {"bool", "uint8", "uint32", "uint64", "int64"};
            for (int k = 0; k < 5; ++k) {
                made.types[k] = nb::object(module.attr("dtype")(names[k])).release().ptr();
            }
            return made;
        }();
        return numpy;
    }
    template <typename T>
    PyObject* type() const {
        if constexpr (std::is_same_v<T, bool>) return types[0];
        if constexpr (std::is_same_v<T, uint8_t>) return types[1];
        if constexpr (std::is_same_v<T, uint32_t>) return types[2];
        if constexpr (std::is_same_v<T, uint64_t>) return types[3];
        if constexpr (std::is_same_v<T, int64_t>) return types[4];
    }
};

// A new numpy array of shape (n,) or (n, columns), to be filled with or without the GIL.
template <typename T>
class Result {
  public:
    explicit Result(size_t size, size_t columns = 0) {
        const Numpy& numpy = Numpy::get();
        nb::object shape = nb::steal(columns == 0 ? PyLong_FromSize_t(size) : Py_BuildValue("(nn)", size, columns));
        if (!shape.is_valid()) throw nb::python_error();
        PyObject* arguments[2] = {shape.ptr(), numpy.type<T>()};
        array_ = nb::steal(PyObject_Vectorcall(numpy.empty, arguments, 2, nullptr));
        if (!array_.is_valid()) throw nb::python_error();
        Py_buffer view;
        if (PyObject_GetBuffer(array_.ptr(), &view, PyBUF_WRITABLE | PyBUF_ND) != 0) throw nb::python_error();
        data_ = {static_cast<T*>(view.buf), size * (columns == 0 ? 1 : columns)};
        PyBuffer_Release(&view);  // the array owns its memory and nobody else can resize it
    }

    template <typename Container>
    static Result of(const Container& values, size_t columns = 0) {
        Result result(columns == 0 ? values.size() : values.size() / columns, columns);
        if (!values.empty()) std::memcpy(result.data_.data(), values.data(), values.size() * sizeof(T));
        return result;
    }

    std::span<T> span() { return data_; }
    nb::object take() { return std::move(array_); }

  private:
    nb::object array_;
    std::span<T> data_;
};

// An integer argument within 0..most.
inline uint64_t whole_number(nb::handle argument, const char* name, uint64_t most) {
    const nb::object number = nb::steal(PyNumber_Index(argument.ptr()));
    if (!number.is_valid()) throw nb::python_error();
    const uint64_t value = PyLong_AsUnsignedLongLong(number.ptr());
    const bool failed = PyErr_Occurred() != nullptr;
    if (failed) PyErr_Clear();
    if (failed || value > most) {
        throw nb::value_error((std::string(name) + " must be within 0.." + std::to_string(most)).c_str());
    }
    return value;
}

void bind_index(nb::module_& module);
void bind_copy(nb::module_& module);
void bind_checksum(nb::module_& module);

}  // namespace tierkv::bindings
