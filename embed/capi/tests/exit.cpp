// A static object that frees memory as the process exits, after the library's thread-local objects are gone, as PyTorch's tensors do.
#include "aquifer.h"

#include <cstdio>

struct Kept {
    void *ptr = nullptr;
    ~Kept() {
        aquifer_free(ptr, 1 << 20, 0, nullptr);
        ptr = aquifer_malloc(1 << 20, 0, reinterpret_cast<void *>(2)); // of a cache that is gone
        std::printf("%d %s\n", aquifer_last_status(), ptr ? "memory" : "none");
    }
};

static Kept kept;
thread_local Kept of_thread;

int main() {
    kept.ptr = aquifer_malloc(1 << 20, 0, nullptr);
    of_thread.ptr = aquifer_malloc(1 << 20, 0, reinterpret_cast<void *>(2));
    if (!kept.ptr || !of_thread.ptr) {
        std::fprintf(stderr, "%s\n", aquifer_last_error());
        return 1;
    }
    return 0;
}
