// A test harness of one screen: TEST(name) { CHECK(condition); }, and RUN_TESTS() as the program.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

namespace tierkv::testing {

struct Test {
    const char* name;
    void (*run)();
};

inline std::vector<Test>& tests() {
    static std::vector<Test> list;
    return list;
}

struct Registration {
    Registration(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

// Aborts rather than throws: a check may fail on any thread, and a sanitizer then shows where.
inline void check(bool good, const char* what, const char* file, int line) {
    if (good) return;
    std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", file, line, what);
    std::abort();
}

template <typename Call>
bool refuses(Call call) {
    try {
        call();
    } catch (const std::invalid_argument&) {
        return true;
    }
    return false;
}

inline int run_all() {
    for (const Test& test : tests()) {
        std::printf("%s\n", test.name);
        std::fflush(stdout);
        test.run();
    }
    return tests().empty() ? 1 : 0;
}

}  // namespace tierkv::testing

#define CHECK(condition) ::tierkv::testing::check((condition), #condition, __FILE__, __LINE__)
#define TEST(name)                                                                 \
    static void name();                                                            \
    static const ::tierkv::testing::Registration registration_##name(#name, name); \
    static void name()
#define RUN_TESTS()                          \
    int main() {                             \
        return ::tierkv::testing::run_all(); \
    }
