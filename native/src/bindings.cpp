// The module tierkv._native; its contract is tierkv/_native.pyi.
#include "bindings.hpp"

#ifndef TIERKV_BUILD_TYPE
#define TIERKV_BUILD_TYPE "unknown"
#endif
#ifndef TIERKV_SANITIZER
#define TIERKV_SANITIZER "none"
#endif

namespace tierkv::bindings {
namespace {

nb::dict build_info() {
    nb::dict info;
#if defined(__clang__)
    info["compiler"] = "clang " __clang_version__;
#else
    info["compiler"] = "gcc " __VERSION__;
#endif
    info["build_type"] = TIERKV_BUILD_TYPE;
#if defined(__OPTIMIZE__)
    info["optimized"] = "yes";
#else
    info["optimized"] = "no";
#endif
    info["sanitizer"] = TIERKV_SANITIZER;
    return info;
}

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "The native core of tierkv: moves bytes and holds the big tables; never decides.";
    bind_index(module);
    bind_copy(module);
    bind_checksum(module);
    module.def("build_info", &build_info, nb::sig("def build_info() -> dict[str, str]"),
               "How the module was built: compiler, build_type, optimized, sanitizer ('none', ...).");
}

}  // namespace tierkv::bindings
