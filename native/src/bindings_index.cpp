#include "bindings.hpp"
namespace tierkv::bindings {
void bind_index(nb::module_&) {}
}
